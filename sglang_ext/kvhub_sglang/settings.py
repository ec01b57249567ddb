"""What a server may reuse and share: a JSON file named by KVHUB_SERVING.

`kvhub serve` writes it; a plain `python -m sglang.launch_server
--radix-cache-backend kvhub` reads the same file from the environment.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from kvhub.errors import BadInput, NotFound
from kvhub.model.identity import Record, Sha256

ENVIRONMENT = "KVHUB_SERVING"
_MAX_BYTES = 1 << 20


class ServedMapper(Record):
    """One mapper this server may apply, named by digest and checked against it."""

    path: str
    digest: Sha256
    state: Literal["draft", "ready", "retired"] = "draft"
    allow_draft: bool = False
    """Serve although the gate was not passed; shown in every response."""


class ServingSettings(Record):
    """Policy of one server. The strictest of server, hints and client wins."""

    exchange: str
    """Directory of the exchange."""
    exchange_max_bytes: int = Field(default=4 << 30, ge=1 << 20)
    publish: bool = True
    """Leave finished blocks in the exchange."""
    mappers: list[ServedMapper] = Field(default_factory=list)
    lineage_mappers: list[Sha256] = Field(default_factory=list)
    """Digests of mappers applied by other servers that may lie under a mapped block
    (with max_hops > 1); the mappers listed above are always allowed."""
    max_hops: int = Field(default=1, ge=1, le=8)
    """How many mappers may lie under a row."""
    min_span: int = Field(default=64, ge=1)
    """Tokens that reuse must save, or the request stays exact."""
    reuse: Literal["asked", "hinted", "always", "off"] = "asked"
    """asked: requests that ask by kv_hints or custom_params; hinted: by kv_hints only;
    always: all that do not decline; off: none."""
    model_path: str | None = None
    """Where the served weights are, if the server was started by another name."""


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
