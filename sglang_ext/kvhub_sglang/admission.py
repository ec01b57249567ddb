"""Requests whose blocks are still being read are passed over; those behind them are admitted."""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult

_NAP = 0.001


@cache
def adder_class(base: type[Any]) -> type[Any]:
    """SGLang's `PrefillAdder`, with the wait of `KvhubRadixCache.must_wait`."""

    class KvhubPrefillAdder(base):  # type: ignore[misc]
        kvhub_napped = False

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            must_wait = getattr(self.tree_cache, "must_wait", None)
            if must_wait is None or not must_wait(req):
                return super().add_one_req(req, *args, **kwargs)
            running = self.running_batch is not None and self.running_batch.reqs
            if not (running or self.can_run_list or self.kvhub_napped):
                # An idle scheduler would spin, and the readers would wait for the interpreter.
                self.kvhub_napped = True
                self.tree_cache.wait_for_stage(_NAP)
            return AddReqResult.CONTINUE

    return KvhubPrefillAdder
