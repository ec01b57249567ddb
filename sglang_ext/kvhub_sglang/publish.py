"""Leave a finished request's blocks in the exchange, under their lineage."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, Namespace, chain_keys
from kvhub_sglang.lineage import EXACT, RowLineages
from kvhub_sglang.place import Pool, forward_order
from kvhub_sglang.plan import Plan
from kvhub_sglang.serving import Serving


def publish(
    serving: Serving, pool: Pool, rows: RowLineages, req: Any, plan: Plan | None, up_to: int, row: Tensor
) -> int:
    """Store the full blocks of `[0, up_to)` that are not there yet; returns how many.

    row: `[up_to]` pool slots of the request's tokens, as the tree now holds them. A
    request under the lossy salt is published in the lossy class; its exact blocks were
    published by whoever computed them.
    """
    started = time.perf_counter()
    lossy = plan is not None and plan.lossy
    tenant = plan.tenant if plan is not None else (req.cache_salt or "", req.extra_key or "")
    keys = chain_keys(
        Namespace(serving.digest, "lossy" if lossy else "exact", tenant),
        req.full_untruncated_fill_ids[:up_to],
    )
    stored = 0
    with forward_order(serving):
        for index, key in enumerate(keys):
            slots = row[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].long()
            lineage = rows.under(slots) if lossy else EXACT
            present = serving.exchange.header(key)
            if (lossy and lineage.exact) or (present is not None and present.lineage.hops <= lineage.hops):
                continue
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
