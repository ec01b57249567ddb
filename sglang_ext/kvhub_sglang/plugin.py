"""Entry point of group `sglang.srt.plugins`; runs in every SGLang process, so it stays tiny."""

from __future__ import annotations

from typing import Any

BACKEND = "kvhub"


def register() -> None:
    """Make `--radix-cache-backend kvhub` known, and place the hooks of `kvhub_sglang.hooks`."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from kvhub_sglang.hooks import place_hooks

    register_radix_cache_backend(BACKEND, _factory)
    place_hooks()


def _factory(ctx: Any) -> Any:
    from kvhub_sglang.backend import create

    return create(ctx)
