"""What of a server's settings decides about a request; `kvhub explain` reads it without the server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvhub.model.identity import MOST, Record, Sha256


class MapperPolicy(Record):
    """One mapper that a server may apply."""

    digest: Sha256
    state: Literal["draft", "ready", "retired"] = "draft"
    exact_prefix: int | None = Field(default=None, ge=0, le=4096)
    """First tokens that are computed, not mapped; None, or less than the mapper's own number: that one."""
    native_tail: int = Field(default=0, ge=0, le=65536)
    """Last tokens of what could be mapped that are computed instead."""
    min_span: int | None = Field(default=None, ge=1, le=MOST)
    """What reuse by this mapper must save at least; None, or less than the server's: the server's."""
    max_hops: int | None = Field(default=None, ge=1, le=8)
    """How many mappers may lie under rows that this one gave, itself included; never more than the
    server's."""
    max_turn: int | None = Field(default=None, ge=1, le=MOST)
    """The last turn of a conversation that this mapper is used for. A request whose turn is not known
    is a later one."""


class Policy(Record):
    """When a server maps."""

    min_span: int = Field(default=64, ge=1, le=MOST)
    """Tokens that reuse must save, or the request stays exact."""
    reuse: Literal["asked", "hinted", "always", "off"] = "asked"
    """asked: requests that ask by kv_hints or custom_params; hinted: by kv_hints only;
    always: all that do not decline; off: none."""
    worth: Literal["auto", "always"] = "auto"
    """auto: a request is mapped only where that is expected to be faster than computing it; always:
    wherever it is allowed. Until something was measured, auto computes."""
    cost_file: str | None = None
    """Where the measured costs are kept between starts."""
