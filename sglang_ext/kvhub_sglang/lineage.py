"""What lies under each row of a request in the lossy namespace.

Rows that the device held there are judged by what this process remembers of their
block, never by what the exact namespace holds now: the same tokens may have been
mapped first and computed exactly later.
"""

from __future__ import annotations

from kvhub.exchange import BLOCK_TOKENS, Lineage
from kvhub_sglang.plan import Plan
from kvhub_sglang.serving import Serving

EXACT = Lineage(hops=0, mappers=[])


def lineage_of(serving: Serving, plan: Plan, keys: list[bytes]) -> list[Lineage]:
    """Lineage of the first `len(keys)` blocks: never less than what lies before a block.

    keys: the request's own chain in the lossy class. Computed rows have the lineage
    of all that is before them.
    """
    result: list[Lineage] = []
    running = EXACT
    for index, key in enumerate(keys):
        running = running.merge(_own(serving, plan, index, key))
        result.append(running)
    return result


def exact_tokens(serving: Serving, plan: Plan) -> int:
    """How many of the reused rows of a lossy request are this model's own, exactly."""
    full = plan.base // BLOCK_TOKENS
    known = lineage_of(serving, plan, plan.keys[:full])
    exact = BLOCK_TOKENS * sum(_own(serving, plan, i, plan.keys[i]).exact for i in range(full))
    if all(lineage.exact for lineage in known):
        exact += plan.base % BLOCK_TOKENS  # the rest of a block was computed on what is before it
    reach = min(plan.exact_to(max(plan.base, plan.exact_length)), plan.reused)
    return exact + max(0, reach - plan.base)


def _own(serving: Serving, plan: Plan, index: int, key: bytes) -> Lineage:
    """Lineage of one block, whatever lies before it."""
    start, end = index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS
    if end <= plan.base:
        return serving.lineage(key, plan.policy_lineage)
    placed = max(start, plan.base, plan.exact_length) < min(end, plan.reused)
    if placed and index in plan.blocks:
        return plan.blocks[index].lineage
    return EXACT  # copied from exact rows, or computed on what is before it
