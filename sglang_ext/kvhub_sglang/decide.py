"""Decide, once per request, what to reuse: best source for each block (law 3 first)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhub.exchange import BLOCK_TOKENS, BlockHeader, Lineage, Namespace, chain_keys
from kvhub_sglang.choice import Choice, choose
from kvhub_sglang.lineage import EXACT
from kvhub_sglang.namespace import policy_digest
from kvhub_sglang.plan import BlockSource, Plan
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.report import Report
from kvhub_sglang.serving import Candidate, Serving


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


class Decision:
    """Builds a plan for one request.

    `match(salt) -> tokens` asks the radix tree, read-only, how many tokens of the
    request's key it holds on the device under a salt.
    """

    def __init__(self, serving: Serving, req: Any, tokens: Sequence[int], limit: int) -> None:
        self.serving = serving
        self.req = req
        self.tokens = tokens
        self.limit = limit - limit % serving.page_size
        self.tenant = (req.cache_salt or "", req.extra_key or "")

    def plan(self, report: Report, match: Any) -> Plan:
        """A plan, or `Refusal`. Looks into the exchange; changes nothing."""
        serving = self.serving
        choice = choose(self.req, serving.settings)
        candidates = [c for c in serving.candidates if choice.sources is None or c.named(choice.sources)]
        plan = Plan(self.req.cache_salt, self.req.cache_salt, self.tenant, report)
        exact = match(self.req.cache_salt)
        own_end = self._add_own(plan, exact)
        allowed = sorted({c.digest for c in candidates} | set(serving.settings.lineage_mappers))
        policy = policy_digest(allowed, choice.max_hops)
        salt = serving.salts.lossy(policy, self.req.cache_salt)
        lossy = match(salt) if candidates else 0
        why = self._add_mapped(plan, candidates, choice, max(own_end, lossy))
        reach = min(plan.covered_to(max(own_end, lossy)), self.limit)
        if candidates and reach - own_end >= serving.settings.min_span:
            plan.lossy, plan.salt = True, salt
            plan.worst = Lineage(hops=choice.max_hops, mappers=allowed)
            needed = max((c.mapper.manifest.exact_prefix for c in plan.applied()), default=0)
            if own_end < needed and lossy < needed:
                raise Refusal(Code.EXACT_PREFIX, f"the first {needed} tokens are not held exactly here")
            return plan
        plan.blocks = {i: b for i, b in plan.blocks.items() if b.candidate is None}
        if own_end > exact:
            return plan
        if self.limit - exact < serving.settings.min_span:
            raise Refusal(Code.EXACT if exact else Code.SHORT, "nothing worth mapping")
        raise why

    def _add_own(self, plan: Plan, exact: int) -> int:
        """Own exact blocks in the exchange beyond the device; returns where exact rows end."""
        serving = self.serving
        keys = chain_keys(Namespace(serving.digest, "exact", self.tenant), self.tokens[: self.limit])
        index = exact // BLOCK_TOKENS
        while index < len(keys) and _is_exact(serving.exchange.header(keys[index])):
            plan.blocks[index] = BlockSource(keys[index], None, EXACT)
            index += 1
        end = min(plan.exact_to(exact), self.limit)
        return end - end % serving.page_size

    def _add_mapped(self, plan: Plan, candidates: list[Candidate], choice: Choice, start: int) -> Refusal:
        """Mapped blocks from `start` on; returns why there are not more."""
        if not candidates:
            return Refusal(Code.NO_SOURCE, "no mapper of an allowed source")
        chains = {c: self._chains(c) for c in candidates}
        for index in range(start // BLOCK_TOKENS, self.limit // BLOCK_TOKENS):
            found, refusal = self._best(candidates, chains, index, choice.max_hops)
            if found is None:
                return refusal
            plan.blocks.setdefault(index, found)
        return Refusal(Code.SHORT, "too few tokens to gain")

    def _chains(self, candidate: Candidate) -> tuple[list[bytes], list[bytes]]:
        model, tokens = candidate.source_digest, self.tokens[: self.limit]
        return (
            chain_keys(Namespace(model, "exact", self.tenant), tokens),
            chain_keys(Namespace(model, "lossy", self.tenant), tokens),
        )

    def _best(
        self,
        candidates: list[Candidate],
        chains: dict[Candidate, tuple[list[bytes], list[bytes]]],
        index: int,
        max_hops: int,
    ) -> tuple[BlockSource | None, Refusal]:
        """The source with the fewest mappers under it for one block."""
        best: BlockSource | None = None
        refusal = Refusal(Code.NO_SOURCE, f"no block {index} of an allowed source")
        allowed = {c.digest for c in candidates} | set(self.serving.settings.lineage_mappers)
        for candidate in candidates:
            for key in (chains[candidate][0][index], chains[candidate][1][index]):
                header = self.serving.exchange.header(key)
                if header is None:
                    continue
                if header.lineage.hops >= max_hops:
                    hops = header.lineage.hops + 1
                    refusal = Refusal(Code.HOPS, f"block {index} would have {hops} mappers under it")
                    continue
                lineage = header.lineage.then(candidate.digest)
                if not set(lineage.mappers) <= allowed:
                    refusal = Refusal(Code.HOPS, f"block {index} has a mapper under it that is not allowed")
                    continue
                if best is None or lineage.hops < best.lineage.hops:
                    best = BlockSource(key, candidate, lineage)
                if lineage.hops == 1:
                    return best, refusal
        return best, refusal


def _is_exact(header: BlockHeader | None) -> bool:
    return header is not None and header.lineage.exact
