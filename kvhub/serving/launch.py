"""The command line, environment and settings file of an SGLang server with kvhub in it."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhub.catalog import files_of
from kvhub.errors import AccessDenied, BadInput, NotFound
from kvhub.files import is_full, unwritable
from kvhub.serving import cpu
from kvhub_registry.records import MapperRow, State

RESERVED = ("--model-path", "--model", "--radix-cache-backend", "--host", "--port", "--dtype")
"""Flags that `kvhub serve` sets itself; `--dtype` is taken from the rest of the line first."""


@dataclass(frozen=True)
class Launch:
    """What to execute: `argv` (argv[0] is the Python in use) in `environment`."""

    argv: list[str]
    environment: dict[str, str]


def settings(
    model_path: Path,
    mappers: Sequence[MapperRow],
    *,
    lineage: Sequence[str] = (),
    exchange: Path | str,
    exchange_max_bytes: int,
    max_hops: int,
    min_span: int,
    reuse: str,
    allow_draft: bool,
    worth: str = "auto",
    exact_prefix: int | None = None,
    native_tail: int = 0,
    max_turn: int | None = None,
    stage_wait_ms: float = 1000.0,
    publish_wait_ms: float = 50.0,
    publish: str = "all",
    heal: bool = False,
    shadow: float = 0.0,
    cost_file: Path | None = None,
    mapper_budget: int | None = None,
) -> dict[str, Any]:
    """The content of the settings file, as the extension in the server reads it.

    lineage: digests of mappers that other servers may have applied before (max_hops > 1).
    """
    return {
        "exchange": str(exchange),
        "exchange_max_bytes": exchange_max_bytes,
        "mappers": [
            {
                "path": str(files_of(row)),
                "digest": row.digest,
                "state": str(row.state),
                "allow_draft": allow_draft and row.state is not State.READY,
                "exact_prefix": exact_prefix,
                "native_tail": native_tail,
                "min_span": None,
                "max_hops": None,
                "max_turn": max_turn,
            }
            for row in mappers
        ],
        "lineage_mappers": list(lineage),
        "max_hops": max_hops,
        "min_span": min_span,
        "reuse": reuse,
        "worth": worth,
        "stage_wait_ms": stage_wait_ms,
        "publish": publish,
        "publish_wait_ms": publish_wait_ms,
        "heal": heal,
        "shadow": shadow,
        "cost_file": None if cost_file is None else str(cost_file),
        "watch_registry": True,
        "mapper_budget": mapper_budget,
        "model_path": str(model_path),
    }


def write_settings(path: Path, content: Mapping[str, Any]) -> None:
    """Write a settings file atomically, readable by its owner alone. Errors: `AccessDenied`, `KvhubError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        if is_full(error):
            raise unwritable(path, error) from None
        raise AccessDenied(f"cannot write serving settings {path}: {error.strerror}") from None


def take_dtype(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of `--dtype` among SGLang's flags, if any, and the other flags.

    Errors: `BadInput` for a flag that `kvhub serve` sets itself, or a dtype without KV in it.
    """
    rest: list[str] = []
    dtype: str | None = None
    waiting = False
    for flag in flags:
        name, equals, value = flag.partition("=")
        if waiting:
            dtype, waiting = flag, False
        elif name == "--dtype":
            dtype, waiting = (value, False) if equals else (None, True)
        elif name.startswith("--") and any(known.startswith(name) for known in (*RESERVED, "--dtype")):
            # SGLang takes abbreviations too
            raise BadInput(f"{name} is set by kvhub serve", "give it before the --, or leave it out")
        else:
            rest.append(flag)
    if waiting:
        raise BadInput("--dtype needs a value")
    known = {"half": "float16", "float": "float32", "auto": None}
    dtype = known.get(dtype, dtype) if dtype else None
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise BadInput(f"--dtype {dtype} cannot be served", "float32, bfloat16 or float16")
    return dtype, rest


def launch(
    model_path: Path,
    settings_file: Path,
    *,
    dtype: str,
    host: str,
    port: int,
    architectures: list[str],
    flags: Sequence[str] = (),
) -> Launch:
    """How to start the server. Errors: `NotFound` where SGLang is not installed."""
    require_sglang()
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
    argv += ["--host", host, "--port", str(port), "--dtype", dtype, "--radix-cache-backend", "kvhub"]
    environment = {**os.environ, "KVHUB_SERVING": str(settings_file)}
    if cpu.wanted():
        argv += cpu.flags(flags)
        environment = {**cpu.variables(architectures), **environment}
    return Launch([*argv, *flags], environment)


def require_free(host: str, port: int) -> None:
    """Say that a port is taken before a model is loaded. Errors: `BadInput`."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise BadInput(f"{host} is no address to listen on: {error.strerror}") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server itself will
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadInput(f"port {port} on {host} is in use", "choose another with --port") from None
            raise BadInput(f"cannot listen on {host}:{port}: {error.strerror}") from None


def require_sglang() -> None:
    """Errors: `NotFound`, with what to install on this kind of machine."""
    if importlib.util.find_spec("sglang") is None:
        raise NotFound("SGLang is not installed", "pip install 'kvhub[sglang]' on a machine with a GPU")
    if cpu.wanted() and importlib.util.find_spec("sgl_kernel") is None:
        raise NotFound(
            "SGLang cannot run here: no GPU, and no CPU stand-in for sgl_kernel",
            "for development and CI, see packaging/sglang_cpu in the repository",
        )
