"""kvhub: map the KV cache of one model to another's, from fit to serving.

Importing this package is cheap: torch is loaded only when a name that needs it
is first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvhub.mapper import Mapper

__all__ = ["Mapper", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Mapper":
        from kvhub.mapper import Mapper

        return Mapper
    raise AttributeError(f"module 'kvhub' has no attribute {name!r}")
