import json
import stat
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.records import mapper_record

from kvhub.errors import AccessDenied, BadInput
from kvhub.serving import launch
from kvhub_registry.records import MapperRow, State


def rows() -> list[MapperRow]:
    made = [mapper_record(seed).model_dump() for seed in (1, 2)]
    states = (State.READY, State.DRAFT)
    return [
        MapperRow(**one, state=state, state_reason="", changed=datetime(2026, 1, 1, tzinfo=UTC))
        for one, state in zip(made, states, strict=True)
    ]


def settings(allow_draft: bool) -> dict[str, object]:
    return launch.settings(
        Path("/models/large"),
        rows(),
        exchange=Path("/exchange"),
        exchange_max_bytes=1 << 20,
        max_hops=2,
        min_span=32,
        reuse="always",
        allow_draft=allow_draft,
    )


def test_the_extension_reads_the_settings_that_are_written(tmp_path: Path) -> None:
    reader = pytest.importorskip("kvhub_sglang.settings")
    file = tmp_path / "new" / "settings.json"
    launch.write_settings(file, settings(allow_draft=True))
    read = reader.load_settings({reader.ENVIRONMENT: str(file)})
    assert read.model_dump(include=set(settings(True))) == settings(True)
    assert [one.allow_draft for one in read.mappers] == [False, True], "the override is for drafts alone"


def test_drafts_stay_forbidden_without_the_override() -> None:
    assert [one["allow_draft"] for one in settings(allow_draft=False)["mappers"]] == [False, False]  # type: ignore[attr-defined]


def test_settings_are_private_and_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text("x" * 10_000)
    launch.write_settings(file, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["settings.json"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AccessDenied, match="cannot write serving settings"):
        launch.write_settings(tmp_path / "file" / "settings.json", {})


@pytest.mark.parametrize(
    ("flags", "dtype", "rest"),
    [
        (["--page-size", "16"], None, ["--page-size", "16"]),
        (["--dtype", "bfloat16", "--tp", "2"], "bfloat16", ["--tp", "2"]),
        (["--dtype=half"], "float16", []),
        (["--dtype", "auto", "x"], None, ["x"]),
    ],
)
def test_dtype_is_taken_from_the_flags(flags: list[str], dtype: str | None, rest: list[str]) -> None:
    assert launch.take_dtype(flags) == (dtype, rest)


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype"],
        ["--dtype", "fp8"],
        ["--model-path", "x"],
        ["--port=3"],
        ["--radix-cache-backend=x"],
        ["--model-pa", "x"],
        ["--radix-cache-b=x"],
        ["--dtyp", "half"],
    ],
)
def test_flags_that_would_contradict_are_refused(flags: list[str]) -> None:
    with pytest.raises(BadInput):
        launch.take_dtype(flags)


def test_the_command_names_the_backend_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    pytest.importorskip("sglang")
    plan = launch.launch(
        Path("/models/large"),
        Path("/home/settings.json"),
        dtype="float32",
        host="::1",
        port=31,
        architectures=["Qwen3ForCausalLM"],
        flags=["--page-size", "16"],
    )
    assert plan.argv[:3] == [sys.executable, "-m", "sglang.launch_server"]
    line = " ".join(plan.argv)
    for part in ("--model-path /models/large", "--radix-cache-backend kvhub", "--host ::1 --port 31"):
        assert part in line
    assert line.endswith("--page-size 16")
    assert plan.environment["KVHUB_SERVING"] == "/home/settings.json"
    assert plan.environment["TORCHDYNAMO_DISABLE"] == "1"
    assert plan.environment["OMP_NUM_THREADS"] == "7", "what the user set wins"
