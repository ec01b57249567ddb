"""Leave a finished request's blocks in the exchange, under their lineage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, EXACT, Namespace, chain_keys
from kvhub_sglang.lineage import RowLineages
from kvhub_sglang.place import Pool, forward_order
from kvhub_sglang.plan import Plan
from kvhub_sglang.publisher import Publication
from kvhub_sglang.serving import Serving


def publish(
    serving: Serving,
    pool: Pool,
    rows: RowLineages,
    req: Any,
    plan: Plan | None,
    up_to: int,
    row: Tensor,
    *,
    wait: bool = True,
) -> int:
    """Hand the full blocks of `[0, up_to)` to the publisher; returns how many are stored already.

    row: `[up_to]` pool slots of the request's tokens, as the tree now holds them. A
    request under the lossy salt is published in the lossy class; its exact blocks were
    published by whoever computed them. wait: see `Publisher.publish`.
    """
    lossy = plan is not None and plan.lossy
    if lossy and serving.settings.publish == "exact":
        return 0
    tenant = plan.tenant if plan is not None else (req.cache_salt or "", req.extra_key or "")
    keys = chain_keys(
        Namespace(serving.digest, "lossy" if lossy else "exact", tenant),
        req.full_untruncated_fill_ids[:up_to],
    )
    publisher, blocks = serving.publisher, []
    with forward_order(serving):
        for index, key in enumerate(keys):
            slots = row[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS].long()
            lineage = rows.under(slots) if lossy else EXACT
            if lossy and lineage.exact:
                continue
            payload = None
            if not publisher.is_stored(key, lineage.hops):
                if not publisher.room(serving.layout.nbytes):
                    serving.metrics.dropped(len(keys) - index)
                    break  # a chain with a hole is of no use beyond it
                payload = pool.read(slots).cpu()
            blocks.append(Publication(key, index * BLOCK_TOKENS, lineage, payload))
    return publisher.publish(serving.digest, serving.layout, blocks, wait=wait) if blocks else 0
