"""The registry of mappers: SQLite by default, PostgreSQL by URL. Never imports torch.

Names are loaded when they are first used: listing needs neither SQLModel nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvhub_registry.errors import (
        Ambiguous,
        BadAddress,
        Damaged,
        Denied,
        Full,
        NotRegistered,
        RegistryError,
        TooNew,
        Unavailable,
    )
    from kvhub_registry.records import (
        UNJUDGED,
        CalibrationRecord,
        EventRecord,
        HubLocation,
        MapperRecord,
        MapperRow,
        ModelRecord,
        ScoreRecord,
        State,
    )
    from kvhub_registry.registry import Registry

__all__ = [
    "UNJUDGED",
    "Ambiguous",
    "BadAddress",
    "CalibrationRecord",
    "Damaged",
    "Denied",
    "EventRecord",
    "Full",
    "HubLocation",
    "MapperRecord",
    "MapperRow",
    "ModelRecord",
    "NotRegistered",
    "Registry",
    "RegistryError",
    "ScoreRecord",
    "State",
    "TooNew",
    "Unavailable",
]

_ERRORS = (
    "Ambiguous",
    "BadAddress",
    "Damaged",
    "Denied",
    "Full",
    "NotRegistered",
    "RegistryError",
    "TooNew",
    "Unavailable",
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "registry" if name == "Registry" else "errors" if name in _ERRORS else "records"
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
