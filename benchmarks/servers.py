"""The shipped pair behind real servers, for the benchmarks that need both."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.server import Server, free_port, running, server_environment
from support.server import hints as hints  # for the benchmarks

from kvhub.serving import launch

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "demo" / "text" / "wikipedia.txt"
PATIENCE = 900.0
"""Seconds that a server may take to start on a machine that is busy with other work."""
OTHER = {"small": "large", "large": "small"}


def report(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What kvhub says of an answer; empty where it says nothing."""
    return next((one for one in answer["meta_info"].get("kvhub") or [] if one), {})


@contextlib.contextmanager
def fitted_home(given: str | None) -> Iterator[str]:
    """A KVHUB_HOME with mappers between the shipped models, both ways; fitted here unless one is given."""
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as home:
        command = ["fit", "models/small", "models/large", "--both", "--dtype", "float32", "--k", "6"]
        command += ["--sequences", "160", "--length", "256", "--stride", "2", "--text", str(TEXT)]
        command += ["--recipe", "ridge"]  # what it maps is not what is measured
        environment = {**os.environ, "KVHUB_HOME": home, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "kvhub", *command], env=environment, cwd=ROOT, check=True)
        yield home


@contextlib.contextmanager
def exchange_directory() -> Iterator[Path]:
    """A private empty directory, in memory where there is a tmpfs."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-", dir=root) as place:
        yield Path(place) / "exchange"


def mappers(home: str) -> dict[str, dict[str, str]]:
    """The mappers of a home by the name of their target: `path` and `digest`."""
    found = {}
    for manifest in sorted(Path(home, "mappers").glob("*/manifest.json")):  # locks lie there, too
        folder, target = manifest.parent, json.loads(manifest.read_text())["target"]["name"]
        found[target] = {"path": str(folder), "digest": folder.name}
    return found


def start(
    stack: contextlib.ExitStack,
    name: str,
    home: str,
    exchange: Path | str,
    *,
    settings: Mapping[str, Any] | None = None,
    mapper: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
    through: Sequence[str] = (),
) -> Server:
    """SGLang with kvhub, on a shipped model that may map from the other one; not waited for.

    The settings file is written as `kvhub serve` writes it, so that everything in it can be
    chosen: `settings` of the server, `mapper` of its mapper. flags: of SGLang. through: a command
    that runs the server's, such as one on another host.
    """
    known, path = mappers(home), ROOT / "models" / name
    content = {
        "exchange": str(exchange),
        "mappers": [{**known[name], "state": "draft", "allow_draft": True, **(mapper or {})}],
        "lineage_mappers": [known[OTHER[name]]["digest"]],
        "worth": "always",  # the shipped pair is so small that mapping it is never worth it
        "model_path": str(path),
        **(settings or {}),
    }
    port = port or free_port()
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvhub-bench-")))
    file = place / "serving.json"
    launch.write_settings(file, content)
    architectures = json.loads((path / "config.json").read_text())["architectures"]
    plan = launch.launch(
        path, file, dtype="float32", host=host, port=port, architectures=architectures, flags=flags
    )
    env = {**plan.environment, "KVHUB_HOME": home, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env |= environment or {}
    command = [*through, *plan.argv]
    live = stack.enter_context(running(command, env, port=port, log=log, cwd=ROOT, wait=False))
    return replace(live, url=f"http://{host}:{port}")


def start_stock(
    stack: contextlib.ExitStack,
    name: str,
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    dtype: str = "float32",
    through: Sequence[str] = (),
) -> Server:
    """Plain SGLang, without kvhub's backend, on a shipped model or one at a path; not waited for."""
    port = free_port()
    path = ROOT / "models" / name if name in OTHER else Path(name).absolute()
    command = [*through, sys.executable, "-m", "sglang.launch_server", "--model-path", str(path)]
    command += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), "--sleep-on-idle"]
    if "--max-total-tokens" not in flags:
        command += ["--max-total-tokens", "32768"]
    env = server_environment(path, {"OMP_NUM_THREADS": "1", **(environment or {})})
    return stack.enter_context(running([*command, *flags], env, port=port, log=log, cwd=ROOT, wait=False))


def serve(
    stack: contextlib.ExitStack,
    model: str,
    exchange: Path | str,
    arguments: Sequence[str] = (),
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
) -> Server:
    """`kvhub serve MODEL`, its mappers allowed whatever their state; not waited for. flags: of SGLang."""
    port = free_port()
    command = [
        *through,
        sys.executable,
        "-m",
        "kvhub",
        "serve",
        model,
        "--allow-draft",
        "--exchange",
        str(exchange),
    ]
    command += [*arguments, "--port", str(port), "--", *flags]
    env = {**os.environ, **(environment or {})}
    return stack.enter_context(running(command, env, port=port, wait=False))


def token_ids(characters: slice = slice(None), model: str = "large") -> list[int]:
    """The demo's text as the tokenizer of a shipped model, or of one at a path, reads it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / model if model in OTHER else model)
    ids: list[int] = tokenizer(TEXT.read_text()[characters])["input_ids"]
    return ids
