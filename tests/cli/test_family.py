"""matrix, plan and search: what there is, what is missing, what it would take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from support.published import publishable
from support.stored import stored

from kvhub.cli.picture import COLOURS
from kvhub.store.coverage import STANDINGS, coverage
from kvhub.store.lifecycle import retire

QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B")


@pytest.fixture
def family(shell) -> dict[str, str]:  # type: ignore[no-untyped-def]
    """8B -> 14B ready, 8B -> 32B failing, 14B -> 32B a draft, 32B -> 8B retired."""
    small, middle, large = QWEN
    made = {
        "ready": stored(shell.settings, 1, source=small, target=middle),
        "failing": stored(shell.settings, 2, source=small, target=large, top1=0.5),
        "draft": stored(shell.settings, 3, source=middle, target=large, top1=None),
        "retired": stored(shell.settings, 4, source=large, target=small),
    }
    retire(made["retired"].digest, why="old", settings=shell.settings)
    return {name: manifest.digest for name, manifest in made.items()}


def test_the_matrix(shell, family: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    found = json.loads(shell.run("matrix", "--family", "qwen3", "--format", "json").stdout)
    standings = {(p["source"], p["target"]): p["standing"] for p in found["pairs"]}
    small, middle, large = QWEN
    assert standings == {
        (small, middle): "ready",
        (small, large): "failing",
        (middle, large): "draft",
        (large, small): "retired",
        (middle, small): "missing",
        (large, middle): "missing",
    }
    (ready,) = (pair for pair in found["pairs"] if pair["standing"] == "ready")
    assert (ready["digest"], ready["top1"]) == (family["ready"], 0.95)
    table = shell.run("matrix").stdout
    assert table.splitlines()[0].split() == ["SOURCE", "\\", "TARGET", "Qwen3-14B", "Qwen3-32B", "Qwen3-8B"]
    assert "ready 0.95" in table
    assert "gate: top1" not in table
    assert "evaluated" in shell.run("matrix", "--format", "list").stdout
    assert json.loads(shell.run("matrix", "--family", "llama", "--format", "json").stdout)["models"] == []
    shell.run("matrix", "--format", "png", code=2)
    shell.run("matrix", "--format", "png", "--output", tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert set(COLOURS) == set(STANDINGS)


def test_a_newer_revision_makes_mappers_stale(shell, family: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    now = ["--served", "qwen3-14b=bbbb", "--model", "Qwen/Qwen3-4B"]
    found = json.loads(shell.run("matrix", *now, "--format", "json").stdout)
    stale = {pair["digest"] for pair in found["pairs"] if pair["standing"] == "stale"}
    assert stale == {family["ready"], family["draft"]}
    assert found["counts"]["missing"] == 2 + 6  # and the model that nobody has mapped yet
    shell.run("matrix", "--served", "nonsense", code=2)
    shell.run("matrix", "--served", " =a", code=2)
    shell.run("matrix", "--model", "", code=2)
    typo = ("matrix", "--served", "qwen3-14b=bbbb", "--served", "nope=abc")
    assert shell.run(*typo).stderr.startswith("--served nope: no mapper here")
    assert "--served" not in shell.run(*typo, "--model", "org/nope").stderr
    unchanged = json.loads(shell.run("matrix", "--served", "qwen3-14b=aaaa", "--format", "json").stdout)
    assert unchanged["counts"]["stale"] == 0


def test_the_best_mapper_of_a_pair_counts(shell) -> None:  # type: ignore[no-untyped-def]
    from kvhub.catalog import open_registry

    good = stored(shell.settings, 1).digest
    stored(shell.settings, 2, top1=0.3)
    newer = stored(shell.settings, 3).digest
    with open_registry(shell.settings) as registry:
        table = coverage(registry.list())
    cell = table.cell("org/Small-1B", "org/Large-7B")
    assert cell.row is not None
    assert (cell.standing, cell.row.digest) == ("ready", newer)
    retire(newer, why="", settings=shell.settings)
    with open_registry(shell.settings) as registry:
        found = coverage(registry.list()).cell("org/Small-1B", "org/Large-7B").row
    assert found is not None
    assert found.digest == good


def test_a_plan(shell, family: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "new").mkdir()
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    found = json.loads(
        shell.run("plan", "qwen3-8b", "qwen3-14b", tmp_path / "new", "--k", 2, "--format", "json").stdout
    )
    pairs = {(p["source"], p["target"]): p for p in found["pairs"]}
    assert len(pairs) == 6
    have = pairs["Qwen/Qwen3-8B", "Qwen/Qwen3-14B"]
    assert (have["digest"], have["state"]) == (family["ready"], "ready")
    # by hand: 2 layers of 2 heads of 4 in, 4 layers of 2 heads of 8 out, k = 2
    need = pairs["Qwen/Qwen3-8B", "new"]
    assert need["parameters"] == 2 * 4 * (2 * 8 * 16 + 16)
    assert need["size"] == 2 * 4 * (2 * 8 * 16 * 2 + 16 * 4)
    assert need["moments"] == 2 * 8 * 16 * (16 + 64)
    local = json.loads(
        shell.run("plan", "qwen3-8b", "qwen3-14b", "--support", "head-local", "--format", "json").stdout
    )
    assert local["size"] < found["size"]
    assert "FIT MEMORY" in shell.run("plan", "qwen3-8b", "qwen3-14b").stdout
    shell.run("plan", "qwen3-8b", code=2)
    shell.run("plan", "qwen3-8b", "nothing", code=3)
    (tmp_path / "new" / "config.json").write_text('{"num_hidden_layers": "many"}')
    shell.run("plan", "qwen3-8b", tmp_path / "new", code=6)


def test_a_plan_of_two_models_of_one_name(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    for place, layers in (("a", 4), ("b", 6), ("c", 4)):
        (tmp_path / place / "model").mkdir(parents=True)
        text = json.dumps({**config, "num_hidden_layers": layers})
        (tmp_path / place / "model" / "config.json").write_text(text)
    said = shell.run("plan", *(tmp_path / place / "model" for place in "ab"), code=2).stderr
    assert "both called model" in said
    for seed, org in enumerate(("one", "two")):
        stored(shell.settings, seed, source=f"{org}/small", target="org/large")
    assert "one/small and two/small" in shell.run("plan", "small", "org/large", code=2).stderr


def test_a_plan_of_what_is_no_model(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    assert "is a file" in shell.run("plan", tmp_path / "file", "org/large", code=2).stderr
    assert "there is no" in shell.run("plan", tmp_path / "absent", "org/large", code=3).stderr


def test_a_plan_does_not_count_a_mapper_of_another_shape(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    stored(shell.settings, 1, source="org/small", target="org/large")
    (tmp_path / "small").mkdir()
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 99}
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    found = json.loads(shell.run("plan", tmp_path / "small", "org/large", "--format", "json").stdout)
    assert found["missing"] == 2
    assert json.loads(shell.run("plan", "small", "large", "--format", "json").stdout)["missing"] == 1


def test_search_is_one_request(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for name, target in (("one", QWEN[1]), ("two", QWEN[2])):
        publishable(tmp_path / name, seed=len(name), source=QWEN[0], target=target)
        shell.run("push", tmp_path / name, f"tester/{name}")
    shell.run("pull", "tester/two")
    hub.log.clear()
    (hit,) = json.loads(shell.run("search", "--target", "qwen3-32b", "--format", "json").stdout)
    assert [path.split("?")[0] for _, path, _, _ in hub.log] == ["/api/models"]
    assert (hit["repository"], hit["source"], hit["top1"], hit["here"]) == (
        "tester/two",
        QWEN[0],
        0.95,
        "ready",
    )
    found = shell.run("search", "--source", QWEN[0], "--format", "quiet").stdout
    assert set(found.split()) == {"tester/one", "tester/two"}
    assert shell.run("search", "--target", "llama").stdout == ""
    hub.log.clear()
    for arguments, more in ((["--local"], {}), ([], {"HF_HUB_OFFLINE": "1"})):
        (row,) = json.loads(shell.run("search", "qwen3", *arguments, "--format", "json", **more).stdout)
        assert (row["repository"], row["here"]) == ("tester/two", "ready")
    assert hub.log == []


def test_a_plan_counts_a_model_once(shell, family: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    small, middle, _ = QWEN
    once = shell.run("plan", small, middle, "--format", "json")
    again = shell.run("plan", small, "qwen3-8b", middle, small, "--format", "json")
    assert json.loads(again.stdout) == json.loads(once.stdout) and once.stderr == ""
    assert again.stderr == f"qwen3-8b and {small} are one model, {small}\n"
    shell.run("plan", small, "qwen3-8b", code=2)
