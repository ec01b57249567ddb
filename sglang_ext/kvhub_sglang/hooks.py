"""The places where SGLang has no override: streamer, admission, the queue, weight updates.

All go through SGLang's own `HookRegistry`, do nothing while the backend is not in
use, and are checked at start (`missing`): a hook that SGLang could not place is
logged there and swallowed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
STREAMER = f"{_SCHEDULER}.get_output_streamer_class"
ADDER = f"{_SCHEDULER}.get_prefill_adder_class"
QUEUE = f"{_SCHEDULER}._add_request_to_queue"
INTAKE = f"{_SCHEDULER}.process_input_requests"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
WEIGHT_UPDATES = (
    *(f"{_UPDATER}.update_weights_from_{origin}" for origin in ("disk", "distributed", "tensor", "ipc")),
    f"{_UPDATER}.check_weights",  # its test actions overwrite weights
    # A session may be filled from outside (RDMA), memory that was given back with anything at all.
    *(f"{_UPDATER}.{name}_weight_update" for name in ("begin", "end")),
    *(f"{_UPDATER}.{name}_memory_occupation" for name in ("release", "resume")),
)

_switch_off: Callable[[str], None] | None = None


def place_hooks() -> None:
    """Register all hooks; SGLang applies them after every plugin has run."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(STREAMER, _streamer_class, HookType.AFTER)
    HookRegistry.register(ADDER, _adder_class, HookType.AFTER)
    HookRegistry.register(QUEUE, _queued, HookType.AFTER)
    HookRegistry.register(INTAKE, _intake, HookType.BEFORE)
    for target in WEIGHT_UPDATES:
        HookRegistry.register(target, _weights_changed, HookType.BEFORE)


def missing() -> list[str]:
    """Targets whose hook is not in place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [
        target
        for target in (STREAMER, ADDER, QUEUE, INTAKE, *WEIGHT_UPDATES)
        if target not in HookRegistry._patched
    ]


def watch_weights(switch_off: Callable[[str], None]) -> None:
    """Call `switch_off(reason)` before any online weight update of this process."""
    global _switch_off
    _switch_off = switch_off


def _weights_changed(*args: Any, **kwargs: Any) -> None:
    # Before, not after: an update that fails half way also leaves unknown weights.
    if _switch_off is not None:
        _switch_off("weights were updated, so the identity of this model is unknown until a restart")


def _queued(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    arrived = getattr(scheduler.tree_cache, "arrived", None)
    if arrived is not None:
        arrived(req)


def _intake(scheduler: Any, received: list[Any], *args: Any, **kwargs: Any) -> None:
    """Requests to ourselves enter where a client's do, so that all of SGLang's own handling applies."""
    take = getattr(scheduler.tree_cache, "take_internal", None)
    if take is None:
        return
    taken = take(lambda: not received and bool(scheduler.is_fully_idle()))
    if taken:
        from kvhub_sglang.internal import as_input

        received.extend(as_input(request) for request in taken)


def _adder_class(adder: type[Any], *args: Any, **kwargs: Any) -> type[Any] | None:
    """Pass over requests whose blocks are still being read, as SGLang does for its own prefetches."""
    if _switch_off is None:
        return None
    from kvhub_sglang.admission import adder_class

    return adder_class(adder)  # type: ignore[arg-type]


def _streamer_class(streamer: type[Any], *args: Any, **kwargs: Any) -> type[Any] | None:
    """Send `meta_info["kvhub"]` once per request, not per token; no answer of a request of our own."""
    if _switch_off is None:
        return None

    class KvhubOutputStreamer(streamer):  # type: ignore[misc]
        def is_request_level_customized_info_key(self, key: str) -> bool:
            if key == "kvhub":
                return True
            return bool(streamer.is_request_level_customized_info_key(self, key))

        def stream_output(self, reqs: list[Any], *args: Any, **kwargs: Any) -> None:
            keep = getattr(self.tree_cache, "keep_internal", None)
            kept = reqs if keep is None else keep(reqs)
            if kept or not reqs:
                with withheld(kept):
                    super().stream_output(kept, *args, **kwargs)

    return KvhubOutputStreamer


@contextlib.contextmanager
def withheld(reqs: Sequence[Any]) -> Iterator[None]:
    """Keep back the reports of retracted requests: each decides anew, and only then is it known what to say.

    With overlap, SGLang streams such a request once more (without a token) when the batch it was in ends.
    """
    reports = [
        (req.customized_info, req.customized_info.pop("kvhub"))
        for req in reqs
        if req.is_retracted and req.customized_info and "kvhub" in req.customized_info
    ]
    try:
        yield
    finally:
        for info, report in reports:
            info["kvhub"] = report
