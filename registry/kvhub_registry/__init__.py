"""The registry of mappers: SQLite by default, PostgreSQL by URL. Never imports torch."""

from __future__ import annotations

from kvhub_registry.errors import (
    Ambiguous,
    BadAddress,
    Damaged,
    Denied,
    NotRegistered,
    RegistryError,
    TooNew,
    Unavailable,
)
from kvhub_registry.records import (
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
    "Ambiguous",
    "BadAddress",
    "CalibrationRecord",
    "Damaged",
    "Denied",
    "EventRecord",
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
