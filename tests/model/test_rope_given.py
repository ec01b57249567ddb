"""RoPE and geometry in config.json that cannot be used: one line with what is wrong, and what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.ropes import LONGROPE, YARN
from support.tiny import LLAMA3, make_tiny

from kvhub.cli import run
from kvhub.model.rope_variants import LISTS, VARIANTS

DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {kind: DEFAULT | {"rope_type": kind, "factor": 4.0} for kind in ("linear", "dynamic")}
TYPES = {"default": DEFAULT, **SCALED, "llama3": LLAMA3, "yarn": YARN, "longrope": LONGROPE}
LENGTH = "original_max_position_embeddings"


class Said(NamedTuple):
    code: int
    error: str
    hint: str


@pytest.fixture
def check(tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    """`kvhub check` of a model whose config.json differs by what is given; a value of `...` removes a key."""
    path = make_tiny(tmp_path / "m")
    original = json.loads((path / "config.json").read_text())

    def ask(**changes: Any) -> Said:
        config = {key: value for key, value in (original | changes).items() if value is not ...}
        (path / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        code = run(["check", str(path), str(path)])
        printed = capsys.readouterr()
        if code == 7:
            refused = printed.out.splitlines().index(
                next(line for line in printed.out.splitlines() if line.startswith("refused"))
            )
            error, hint = printed.out.splitlines()[refused : refused + 2]
            return Said(code, error, hint)
        lines = printed.err.splitlines()
        assert len(lines) == (0 if code == 0 else 2), printed.err
        return Said(code, *lines) if lines else Said(code, "", "")

    return ask


@pytest.mark.parametrize("kind", TYPES)
def test_every_parameter_that_a_type_needs(check, kind: str) -> None:  # type: ignore[no-untyped-def]
    whole = TYPES[kind]
    assert check(rope_parameters=whole).code == 0
    assert set(VARIANTS) == set(TYPES)
    for key in VARIANTS[kind].required:
        without = {name: value for name, value in whole.items() if name != key}
        if key not in ("rope_theta", LENGTH):  # that has a code of its own, this transformers fills in
            said = check(rope_parameters=without)
            assert (said.code, f"RoPE of type '{kind}' needs '{key}'" in said.error) == (2, True), said
            assert f"'{kind}' takes rope_theta" in said.hint and "config.json" in said.hint
            old = {name: value for name, value in without.items() if name not in ("rope_type", "rope_theta")}
            said = check(rope_parameters=..., rope_theta=1e4, rope_scaling=old | {"type": kind})
            assert (said.code, f"needs '{key}'" in said.error) == (2, True), said
        said = check(rope_parameters=whole | {key: None})
        assert (said.code, f"needs '{key}'" in said.error) == (2, True), said
    said = check(rope_parameters={name: value for name, value in whole.items() if name != "rope_theta"})
    assert (said.code, "[rope_theta]" in said.error) == (7, True)


@pytest.mark.parametrize("kind", TYPES)
def test_values_that_are_none(check, kind: str) -> None:  # type: ignore[no-untyped-def]
    for key in (*VARIANTS[kind].required, *VARIANTS[kind].optional):
        for value in ("4", -1, 0, True, [1.0], {"a": 1}, 10**400):
            said = check(rope_parameters=TYPES[kind] | {key: value})
            if key == "truncate" and value is True:
                assert said.code == 0
                continue
            assert said.code == 2 and f"RoPE parameter '{key}' must" in said.error, (key, value, said)
            assert said.hint.startswith("Hint: ")
        for name, value in (("NaN", float("nan")), ("Infinity", float("inf"))):
            given = [1.0, value] if key in LISTS else value
            said = check(rope_parameters=TYPES[kind] | {key: given})
            assert (said.code, said.error.endswith(f"config.json: not valid JSON: it holds {name}")) == (
                6,
                True,
            )
            assert name in said.hint
    if LENGTH in VARIANTS[kind].required:
        said = check(rope_parameters=TYPES[kind] | {LENGTH: 64.5})
        assert (said.code, "must be a whole number, got 64.5" in said.error) == (2, True)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("beside", [{}, {"rope_theta": 1e4}], ids=["", "theta"])
@pytest.mark.parametrize("kind", [{}, {"rope_type": "default"}], ids=["", "type"])
def test_parameters_by_kind_of_layer(check, place: str, beside: dict, kind: dict) -> None:  # type: ignore[no-untyped-def, type-arg]
    """As transformers 5 writes them: theta is inside each kind of layer, and nowhere else."""
    layers = {"full_attention": DEFAULT, "sliding_attention": DEFAULT | {"rope_theta": 1e6}}
    said = check(**{"rope_parameters": ..., place: layers | kind, **beside})
    assert (said.code, said.error.endswith("[rope_per_layer]")) == (7, True), said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_parameters": [DEFAULT] * 3}, "rope_parameters in config.json must be an object"),
        ({"rope_parameters": "yarn"}, "rope_parameters in config.json must be an object"),
        ({"rope_parameters": DEFAULT | {"rope_type": 3}}, "'rope_type' must be a name, got 3"),
        ({"rope_parameters": DEFAULT | {"rope_type": None}}, "'rope_type' must be a name, got None"),
        ({"rope_parameters": ..., "rope_theta": "1e4"}, "'rope_theta' must be a positive number, got '1e4'"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0] * 7}}, "must list 8 numbers"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 5.0}}, "must be below 'high_freq_factor'"),
        *(
            ({key: value}, f"{key} in config.json must be a whole number of 1 to")
            for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
            for value in (None, "4", 0, -1, 1.5, True, 1 << 40)
        ),
        ({"num_key_value_heads": [2]}, "num_key_value_heads in config.json must be a whole number of 1 to"),
        ({"head_dim": -4}, "head_dim in config.json must be a whole number of 1 to"),
    ],
)
def test_other_things_that_cannot_be(check, changes: dict, says: str) -> None:  # type: ignore[no-untyped-def, type-arg]
    said = check(**changes)
    assert (said.code, says in said.error) == (2, True), said
    assert said.hint.startswith("Hint: ")
