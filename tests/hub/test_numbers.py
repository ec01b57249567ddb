"""Numbers that a mapper of others may hold: bounded where they are read, nothing kept of what is refused."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from loopback_hub import LoopbackHub
from starlette.testclient import TestClient

import kvhub.diagnostics.record
import kvhub.exchange.block
import kvhub.hub.lockfile
import kvhub.serving.policy
import kvhub.store.signature
import kvhub.store.trust  # noqa: F401 - all records are defined
from kvhub.artifact.manifest import Manifest
from kvhub.catalog import open_registry
from kvhub.cli import cli
from kvhub.cli.output import finite
from kvhub.errors import Corrupt
from kvhub.hub.pull import fetch
from kvhub.model.identity import Record, canonical_json, within_bounds
from kvhub.settings import Settings
from kvhub.store.recover import put_back
from kvhub.ui.app import application

REPO = "tester/mapper"
Change = Callable[[dict[str, Any]], None]


def _set(*way: Any) -> Change:
    *path, key, value = way

    def change(content: dict[str, Any]) -> None:
        inner: Any = content
        for step in path:
            inner = inner[step]
        inner[key] = value

    return change


MANIFESTS = {
    "tokens": _set("calibration", "tokens", 10**30),
    "calibration rows": _set("calibration", "rows", 2**63),
    "rows": _set("fit_scores", "rows", 10**30),
    "a mean that is infinite": _set("fit_scores", "r2_key", [1e308] * 3),
    "R2 above 1": _set("fit_scores", "r2_value", [1.5] * 3),
    "a RoPE factor": _set("source", "rope", "attention_factor", 1e300),
    "a RoPE parameter": _set("source", "rope", "parameters", "rope_theta", 10**30),
    "a context": _set("target", "rope", "max_position", 10**30),
}
EVIDENCE = {
    "n": _set("scores", 0, "n", 10**30),
    "windows": _set("windows", 10**30),
    "exact prefix": _set("exact_prefix", 2**64),
    "a value": _set("scores", 0, "value", 1e308),
    "an interval": _set("scores", 0, "high", -1e300),
    "a check of the gate": _set("verdict", "checks", 0, "found", 1e308),
    "an error below zero": _set("injection_max_logit_error", -1.0),
}


@pytest.fixture
def hostile(
    request: pytest.FixtureRequest, published: Manifest, hub: LoopbackHub, tmp_path: Path
) -> tuple[str, Path]:
    """Digest and directory of a mapper with one hostile number; also at tester/mapper."""
    name, change = request.param
    files = {n: json.loads((tmp_path / "made" / n).read_bytes()) for n in ("manifest.json", "evidence.json")}
    change(files[name])
    data = canonical_json(files["manifest.json"]) + b"\n"
    digest = hashlib.sha256(data).hexdigest()
    evidence = canonical_json(files["evidence.json"] | {"mapper": digest}) + b"\n"
    for path, content in (("manifest.json", data), ("evidence.json", evidence)):
        (tmp_path / "made" / path).write_bytes(content)
        hub.store.put_file(REPO, path, content)
    return digest, tmp_path / "made"


CASES = [
    *(pytest.param(("manifest.json", change), id=f"manifest, {name}") for name, change in MANIFESTS.items()),
    *(pytest.param(("evidence.json", change), id=f"evidence, {name}") for name, change in EVIDENCE.items()),
]


@pytest.mark.parametrize("hostile", CASES, indirect=True)
def test_no_such_number_comes_in(hostile: tuple[str, Path], home: Settings) -> None:
    """By pull, register or verify; and nothing of it stays."""
    _, directory = hostile
    for take in (lambda: fetch(REPO), lambda: put_back(directory, home)):
        with pytest.raises(Corrupt, match="json: "):
            take()
    assert [path.name for path in home.mappers.glob("*") if path.name != ".lock"] == []
    with open_registry(home) as registry:
        assert registry.list() == []
    found = CliRunner().invoke(cli, ["verify", str(directory)], standalone_mode=False)
    assert isinstance(found.exception, Corrupt)


def test_every_number_of_a_record_has_two_bounds() -> None:
    """A record is read from others, so one that has none would be a way in."""

    def unbounded(schema: Any, where: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if schema.get("type") in ("integer", "number") and "const" not in schema:
                low = {"minimum", "exclusiveMinimum"} & set(schema)
                high = {"maximum", "exclusiveMaximum"} & set(schema)
                if not (low and high):
                    yield where
            for key, inner in schema.items():
                yield from unbounded(inner, f"{where}.{key}")
        elif isinstance(schema, list):
            for inner in schema:
                yield from unbounded(inner, where)

    kinds = [kind for kind in Record.__subclasses__() if kind.__module__.startswith("kvhub")]
    assert len(kinds) >= 25
    assert [where for kind in kinds for where in unbounded(kind.model_json_schema(), kind.__name__)] == []


def test_what_was_measured_here_fits_a_record() -> None:
    assert within_bounds(1e300) == 1e15 and within_bounds(float("-inf")) == -1e15
    assert within_bounds(0.5) == 0.5
    assert within_bounds(float("nan")) != within_bounds(float("nan"))


def test_a_registry_that_holds_infinity_is_shown(published: Manifest, home: Settings) -> None:
    """As an older version could have taken it: null for programs, in the list, the mapper and the browser."""
    row = fetch(REPO)
    with sqlite3.connect(home.home / "registry.db") as database:
        for value, metric in ((float("inf"), "r2_key"), (float("-inf"), "top1")):
            done = database.execute(
                "UPDATE kvhub_score SET value = ?, high = ? WHERE metric = ?", (value, value, metric)
            )
            assert done.rowcount
    for arguments in (["list"], ["info", row.digest], ["search", "--local", ""]):
        done = CliRunner().invoke(cli, [*arguments, "--format", "json"], catch_exceptions=False)
        found = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
        found = found[0] if isinstance(found, list) else found
        assert found["top1"] is None
        assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    with TestClient(application(home), base_url="http://localhost") as browser:
        assert browser.get("/mappers.json").json()[0]["top1"] is None
        assert all(browser.get(page).status_code == 200 for page in ("/", f"/mapper/{row.digest}"))


def test_null_is_put_where_json_has_no_number() -> None:
    nested = {"a": [float("nan"), 1, ("x", float("inf"))], "b": {"c": -0.5}}
    assert finite(nested) == {"a": [None, 1, ["x", None]], "b": {"c": -0.5}}
