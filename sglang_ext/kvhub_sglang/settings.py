"""What a server may reuse and share: a JSON file named by KVHUB_SERVING.

`kvhub serve` writes it; a plain `python -m sglang.launch_server
--radix-cache-backend kvhub` reads the same file from the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from kvhub.errors import BadInput, NotFound
from kvhub.model.identity import Sha256
from kvhub.serving.policy import MapperPolicy, Policy

ENVIRONMENT = "KVHUB_SERVING"
_MAX_BYTES = 1 << 20


class ServedMapper(MapperPolicy):
    """One mapper this server may apply, named by digest and checked against it."""

    path: str
    allow_draft: bool = False
    """Serve although the gate was not passed; shown in every response."""


class ServingSettings(Policy):
    """Policy of one server. The strictest of server, hints and client wins."""

    exchange: str
    """Directory of the exchange."""
    exchange_max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    publish: Literal["all", "exact", "none"] = "all"
    """Which finished blocks are left in the exchange. exact: those with no mapper under them, which is
    all that anybody can read where every server of the exchange has `max_hops` 1."""
    mappers: list[ServedMapper] = Field(default_factory=list)
    lineage_mappers: list[Sha256] = Field(default_factory=list)
    """Digests of mappers applied by other servers that may lie under a mapped block
    (with max_hops > 1); the mappers listed above are always allowed."""
    max_hops: int = Field(default=1, ge=1, le=8)
    """How many mappers may lie under a row."""
    stage_wait_ms: float = Field(default=1000.0, ge=0, le=60000)
    """How long a request waits for its blocks to be read and checked, at most."""
    stage_threads: int = Field(default=2, ge=1, le=32)
    stage_max_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Memory for blocks that are read and not yet placed."""
    publish_wait_ms: float = Field(default=50.0, ge=0, le=10000)
    """How long an answer waits for its blocks to be in the exchange, so that the next turn finds them."""
    publish_max_bytes: int = Field(default=1 << 28, ge=1 << 16)
    """Memory for blocks that are not yet in the exchange; what does not fit is not published."""
    watch_seconds: float = Field(default=2.0, ge=0, le=3600)
    """How often this file and the artifacts are asked whether a mapper was withdrawn; 0: never."""
    watch_registry: bool = False
    """Ask the registry of this user as well."""
    heal: bool = False
    """When idle, compute spans that were mapped, so that exact rows are found at the next turn."""
    heal_tokens: int = Field(default=512, ge=64, le=65536)
    """Tokens that one healing request computes."""
    shadow: float = Field(default=0.0, ge=0, le=1)
    """Share of mapped requests whose next-token distribution is compared with the native one, when idle."""
    mapper_budget: int | None = Field(default=None, ge=1 << 20)
    """Bytes of mappers kept ready for the kernels; the least recently used goes first. None: all of them."""
    model_path: str | None = None
    """Where the served weights are, if the server was started by another name."""

    @field_validator("publish", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        """What files written for version 0.1 say."""
        return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


def load_settings(environment: dict[str, str] | None = None) -> ServingSettings:
    """Read the file named by KVHUB_SERVING.

    Errors: `NotFound` where the variable or the file is missing, `BadInput` where
    the file is not valid.
    """
    name = (environment if environment is not None else os.environ).get(ENVIRONMENT)
    if not name:
        raise NotFound(
            f"{ENVIRONMENT} names no settings file",
            "start the server with `kvhub serve`, or write the file and set the variable",
        )
    try:
        with Path(name).open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(f"cannot read serving settings {name}: {error.strerror}") from None
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError("too large")
        return ServingSettings.model_validate(json.loads(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"serving settings {name}: {where}: {first['msg']}") from None
    except ValueError as error:
        raise BadInput(f"serving settings {name} are not valid JSON: {error}") from None
