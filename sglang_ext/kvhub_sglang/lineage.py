"""What lies under each block of a request: never less than what lies under those before it."""

from __future__ import annotations

from kvhub.exchange import BLOCK_TOKENS, Lineage
from kvhub_sglang.plan import Plan
from kvhub_sglang.serving import Serving

EXACT = Lineage(hops=0, mappers=[])


def lineage_of(serving: Serving, plan: Plan, keys: list[bytes]) -> list[Lineage]:
    """Lineage of the first `len(keys)` blocks of a lossy request.

    keys: the request's own chain in the lossy class. Reused blocks: what the plan
    placed, else what this process remembers, else the worst that the namespace
    admits. Computed blocks: all that is before them.
    """
    exact_blocks = plan.exact_to(plan.exact_length) // BLOCK_TOKENS
    result: list[Lineage] = []
    running = EXACT
    for index, key in enumerate(keys):
        start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
        if index >= exact_blocks and start < plan.reused:
            if end > plan.base and index in plan.blocks:
                found = plan.blocks[index].lineage
            else:
                found = serving.lineage(key, plan.policy_lineage)
            running = running.merge(found)
        result.append(running)
    return result
