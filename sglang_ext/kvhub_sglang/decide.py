"""Decide what to reuse for one request: best source for each block (law 3 first).

`ask` and `compose` run on the scheduler's thread and touch nothing that can block: what is
allowed, what the tree holds, under which salt the request lives. Between them a worker asks
the exchange (`lookup.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvhub.exchange import Lineage
from kvhub_sglang.choice import Choice, choose
from kvhub_sglang.namespace import policy_digest
from kvhub_sglang.plan import Plan
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.serving import Candidate, Serving
from kvhub_sglang.stage import Found


class Held(NamedTuple):
    """Tokens of a request that the tree holds on the device, and beyond them in SGLang's host cache."""

    device: int
    host: int


Match = Callable[[str | None], Held]
"""`match(salt)`: what the tree holds of the request in one namespace, read-only."""


def unsupported(req: Any) -> str | None:
    """Why this kind of request is left to SGLang, or None."""
    if getattr(req, "session", None) is not None or getattr(req, "session_id", None):
        return "sessions"
    if getattr(req, "lora_id", None) is not None:
        return "LoRA"
    if getattr(req, "input_embeds", None) is not None:
        return "input embeddings"
    if getattr(req, "positional_embed_overrides", None) is not None:
        return "embedding overrides"
    if getattr(req, "multimodal_inputs", None) is not None:
        return "multimodal input"
    if getattr(req, "beam_group", None) is not None:
        return "beam search"
    return None


class NeedsPrefix(Refusal):
    """The first tokens must be computed before the rest can be mapped."""

    def __init__(self, tokens: int) -> None:
        super().__init__(Code.EXACT_PREFIX, f"the first {tokens} tokens are not held exactly here")
        self.tokens = tokens


@dataclass(frozen=True)
class Question:
    """What one request asks of the exchange; fixed when it is asked."""

    tokens: Sequence[int]
    limit: int
    """Tokens that may be reused, page-aligned."""
    tenant: tuple[str, str]
    original_salt: str | None
    lossy_salt: str
    choice: Choice
    candidates: tuple[Candidate, ...]
    allowed: tuple[str, ...]
    """Digests of mappers that may lie under a row."""
    exact: int
    """Tokens on the device in the request's own namespace, when it was asked."""
    lossy: int
    """The same in the lossy one."""
    absent: Refusal
    """Why nothing is mapped where there are no candidates."""

    def worth_it(self, gained: int, found: Found, least: int) -> bool:
        """Whether `gained` tokens are enough for every mapper that would be used. least: for the server."""
        return gained >= max([least, *(c.min_span for c in found.candidates)])


def ask(serving: Serving, req: Any, tokens: Sequence[int], limit: int, match: Match) -> Question:
    """What to look for, or `Refusal` where nothing can be gained."""
    choice = choose(req, serving.settings)
    named = tuple(c for c in serving.candidates if choice.sources is None or c.named(choice.sources))
    candidates = tuple(c for c in named if c.serves_turn(choice.turn))
    absent = Refusal(Code.NO_SOURCE, "no mapper of an allowed source")
    if named and not candidates:
        absent = Refusal(Code.TURNS, f"its mappers are not used in turn {choice.turn or '(not said)'}")
    limit -= limit % serving.page_size
    allowed = sorted({c.digest for c in candidates} | set(serving.settings.lineage_mappers))
    salt = serving.salts.lossy(policy_digest(allowed, choice.max_hops), req.cache_salt)
    exact, host = match(req.cache_salt)
    lossy = match(salt).device if candidates else 0
    if limit - exact - host < serving.settings.min_span and lossy <= exact + host:
        raise Refusal(Code.EXACT if exact else Code.SHORT, "nothing worth mapping")
    return Question(
        tokens=tokens,
        limit=limit,
        tenant=(req.cache_salt or "", req.extra_key or ""),
        original_salt=req.cache_salt,
        lossy_salt=salt,
        choice=choice,
        candidates=candidates,
        allowed=tuple(allowed),
        exact=exact,
        lossy=lossy,
        absent=absent,
    )


def compose(serving: Serving, plan: Plan, question: Question, found: Found, match: Match) -> None:
    """Turn what is staged into a decision, with what the tree holds now; `Refusal` where it is none.

    Chooses the namespace that the request lives in from here on. Changes the plan alone.
    """
    plan.blocks = dict(found.blocks)
    for candidate in found.candidates:
        if candidate not in serving.candidates:
            raise Refusal(Code.WITHDRAWN, "the mapper was withdrawn")
    exact, host = match(question.original_salt)
    lossy = match(question.lossy_salt).device if question.candidates else 0
    own_end = min(plan.exact_to(exact), question.limit)
    own_end -= own_end % serving.page_size
    start = max(own_end, lossy)
    end = min(plan.covered_to(start), question.limit)
    gained = end - max(own_end, exact + host)
    if question.candidates and question.worth_it(gained, found, serving.settings.min_span):
        needed = max((c.exact_prefix for c in found.candidates), default=0)
        if own_end < needed and lossy < needed:
            raise NeedsPrefix(needed)
        plan.lossy, plan.salt = True, question.lossy_salt
        plan.worst = Lineage(hops=question.choice.max_hops, mappers=list(question.allowed))
        return
    plan.blocks = {i: b for i, b in plan.blocks.items() if b.candidate is None}
    if plan.exact_to(exact) > exact:
        return
    if host:
        raise Refusal(Code.HICACHE, "SGLang's host cache holds as much, exactly")
    if question.limit - exact < serving.settings.min_span:
        raise Refusal(Code.EXACT if exact else Code.SHORT, "nothing worth mapping")
    raise found.why or Refusal(Code.SHORT, "too few tokens to gain")
