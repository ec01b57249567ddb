"""Decide what to reuse for one request: best source for each block (law 3 first).

In two halves. `ask` and `compose` run on the scheduler's thread and touch nothing that
can block: what is allowed, what the tree holds, under which salt the request lives.
`look_up` runs on a worker and asks the exchange.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhub.exchange import BLOCK_TOKENS, EXACT, Block, BlockHeader, Lineage, Namespace, chain_keys
from kvhub.serving.cost import Estimate
from kvhub_sglang.choice import Choice, choose
from kvhub_sglang.namespace import policy_digest
from kvhub_sglang.plan import BlockSource, Plan, reach_of
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.serving import Candidate, Serving
from kvhub_sglang.stage import Found

Match = Callable[[str | None], int]
"""`match(salt) -> tokens`: how many tokens of the request the tree holds on the device, read-only."""


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


def ask(serving: Serving, req: Any, tokens: Sequence[int], limit: int, match: Match) -> Question:
    """What to look for, or `Refusal` where nothing can be gained."""
    choice = choose(req, serving.settings)
    candidates = tuple(c for c in serving.candidates if choice.sources is None or c.named(choice.sources))
    limit -= limit % serving.page_size
    allowed = sorted({c.digest for c in candidates} | set(serving.settings.lineage_mappers))
    salt = serving.salts.lossy(policy_digest(allowed, choice.max_hops), req.cache_salt)
    exact = match(req.cache_salt)
    lossy = match(salt) if candidates else 0
    if limit - exact < serving.settings.min_span and lossy <= exact:
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
    )


def look_up(serving: Serving, question: Question) -> Found:
    """The blocks to read, contiguous from what the device holds, and why there are not more.

    Runs on a worker. Headers are believed for looking alone; what is read is proven.
    """
    own = _own(serving, question)
    why = Refusal(Code.NO_SOURCE, "no mapper of an allowed source")
    own_end = min(reach_of(own, question.exact), question.limit)
    start = max(own_end - own_end % serving.page_size, question.lossy)
    mapped: dict[int, BlockSource] = {}
    if question.candidates:
        mapped, why = _mapped(serving, question, start)
    reach = min(reach_of({**mapped, **own}, start), question.limit)
    if question.candidates and reach - own_end >= serving.settings.min_span:
        # own blocks below the device's lossy rows are not needed: those rows are there
        kept = own if question.lossy <= own_end else {}
        found = Found({**mapped, **kept}, why)
        found.estimate = _estimate(serving, question, found.blocks, start, reach)
        if not mapped or question.choice.worth == "always" or found.estimate.worth:
            for candidate in found.candidates:
                candidate.make_ready()  # here, not on the scheduler's thread
            return found
        return Found(own, Refusal(Code.NOT_WORTH_IT, found.estimate.reason), found.estimate)
    return Found(own, why)


def _estimate(
    serving: Serving, question: Question, blocks: dict[int, BlockSource], start: int, reach: int
) -> Estimate:
    """Mapping from `start` to `reach`, against computing what the device and own blocks do not give."""
    counts: Counter[str] = Counter()
    for index, source in blocks.items():
        if source.candidate is not None:
            counts[source.candidate.digest] += BLOCK_TOKENS - max(0, start - index * BLOCK_TOKENS)
    return serving.cost.judge(
        prompt=len(question.tokens),
        held=start,
        reach=reach,
        mapped=counts,
        blocks=sum(source.candidate is not None for source in blocks.values()),
    )


def read(serving: Serving, source: BlockSource) -> Block:
    """Read and check one block (on a worker)."""
    candidate = source.candidate
    model = candidate.source_digest if candidate else serving.digest
    layout = candidate.layout if candidate else serving.layout
    return serving.exchange.get(source.key, model=model, layout=layout)


def compose(serving: Serving, plan: Plan, question: Question, found: Found, match: Match) -> None:
    """Turn what is staged into a decision, with what the tree holds now; `Refusal` where it is none.

    Chooses the namespace that the request lives in from here on. Changes the plan alone.
    """
    plan.blocks = dict(found.blocks)
    for candidate in found.candidates:
        if candidate not in serving.candidates:
            raise Refusal(Code.WITHDRAWN, "the mapper was withdrawn")
    exact = match(question.original_salt)
    lossy = match(question.lossy_salt) if question.candidates else 0
    own_end = min(plan.exact_to(exact), question.limit)
    own_end -= own_end % serving.page_size
    start = max(own_end, lossy)
    end = min(plan.covered_to(start), question.limit)
    gained = end - own_end
    if question.candidates and gained >= serving.settings.min_span:
        needed = max((c.exact_prefix for c in found.candidates), default=0)
        if own_end < needed and lossy < needed:
            raise NeedsPrefix(needed)
        plan.lossy, plan.salt = True, question.lossy_salt
        plan.worst = Lineage(hops=question.choice.max_hops, mappers=list(question.allowed))
        return
    plan.blocks = {i: b for i, b in plan.blocks.items() if b.candidate is None}
    if plan.exact_to(exact) > exact:
        return
    if question.limit - exact < serving.settings.min_span:
        raise Refusal(Code.EXACT if exact else Code.SHORT, "nothing worth mapping")
    raise found.why or Refusal(Code.SHORT, "too few tokens to gain")


def _own(serving: Serving, question: Question) -> dict[int, BlockSource]:
    """Own exact blocks in the exchange beyond the device."""
    tokens = question.tokens[: question.limit]
    keys = chain_keys(Namespace(serving.digest, "exact", question.tenant), tokens)
    blocks: dict[int, BlockSource] = {}
    index = question.exact // BLOCK_TOKENS
    while index < len(keys) and _is_exact(serving.exchange.header(keys[index])):
        blocks[index] = BlockSource(keys[index], None, EXACT, serving.layout.nbytes)
        index += 1
    return blocks


def _mapped(serving: Serving, question: Question, start: int) -> tuple[dict[int, BlockSource], Refusal]:
    """Mapped blocks from `start` on, and why there are not more."""
    tokens = question.tokens[: question.limit]
    chains = {
        candidate: [
            chain_keys(Namespace(candidate.source_digest, kind, question.tenant), tokens)
            for kind in ("exact", "lossy")
        ]
        for candidate in question.candidates
    }
    blocks: dict[int, BlockSource] = {}
    for index in range(start // BLOCK_TOKENS, question.limit // BLOCK_TOKENS):
        found, refusal = _best(serving, question, chains, index)
        if found is None:
            return blocks, refusal
        blocks[index] = found
    return blocks, Refusal(Code.SHORT, "too few tokens to gain")


def _best(
    serving: Serving, question: Question, chains: dict[Candidate, list[list[bytes]]], index: int
) -> tuple[BlockSource | None, Refusal]:
    """The source with the fewest mappers under it for one block."""
    best: BlockSource | None = None
    refusal = Refusal(Code.NO_SOURCE, f"no block {index} of an allowed source")
    for candidate in question.candidates:
        for keys in chains[candidate]:
            header = serving.exchange.header(keys[index])
            if header is None:
                continue
            if header.lineage.hops >= question.choice.max_hops:
                hops = header.lineage.hops + 1
                refusal = Refusal(Code.HOPS, f"block {index} would have {hops} mappers under it")
                continue
            lineage = header.lineage.then(candidate.digest)
            if not set(lineage.mappers) <= set(question.allowed):
                refusal = Refusal(Code.HOPS, f"block {index} has a mapper under it that is not allowed")
                continue
            if best is None or lineage.hops < best.lineage.hops:
                best = BlockSource(keys[index], candidate, lineage, candidate.layout.nbytes)
            if lineage.hops == 1:
                return best, refusal
    return best, refusal


def _is_exact(header: BlockHeader | None) -> bool:
    return header is not None and header.lineage.exact
