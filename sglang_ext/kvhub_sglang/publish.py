"""Leave a finished request's blocks in the exchange, under their exact lineage."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, Namespace, chain_keys
from kvhub_sglang.lineage import EXACT, lineage_of
from kvhub_sglang.place import Pool, forward_order
from kvhub_sglang.plan import Plan
from kvhub_sglang.serving import Serving


def publish(serving: Serving, pool: Pool, req: Any, plan: Plan | None, up_to: int, row: Tensor) -> int:
    """Store the full blocks of `[0, up_to)` that are not there yet; returns how many.

    row: `[up_to]` pool slots of the request's tokens. A request under the lossy salt
    is published from its first lossy block on, in the lossy class; its exact head
    was published by whoever computed it.
    """
    started = time.perf_counter()
    tokens = req.full_untruncated_fill_ids[:up_to]
    lossy = plan is not None and plan.lossy
    tenant = plan.tenant if plan is not None else (req.cache_salt or "", req.extra_key or "")
    keys = chain_keys(Namespace(serving.digest, "lossy" if lossy else "exact", tenant), tokens)
    lineages = lineage_of(serving, plan, keys) if plan is not None and lossy else [EXACT] * len(keys)
    wanted = []
    for index, (key, lineage) in enumerate(zip(keys, lineages, strict=True)):
        if lossy:
            serving.remember(key, lineage)
        if lossy and lineage.exact:
            continue  # published by whoever computed it
        present = serving.exchange.header(key)
        if present is None or present.lineage.hops > lineage.hops:
            wanted.append((index, key, lineage))
    stored = 0
    with forward_order(serving):
        for index, key, lineage in wanted:
            slots = row[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].long()
            stored += serving.exchange.put(
                key,
                model=serving.digest,
                position=index * BLOCK_TOKENS,
                layout=serving.layout,
                lineage=lineage,
                payload=pool.read(slots),
            )
    serving.metrics.published(stored, time.perf_counter() - started)
    return stored
