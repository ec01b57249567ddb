"""`kvhub serve` up to the moment it becomes SGLang (the demo and tests/sglang go on from there)."""

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.mappers import make_manifest, random_tensors
from support.records import digest
from support.tiny import make_tiny

from kvhub.artifact.write import write_artifact
from kvhub.catalog import to_record
from kvhub.cli import run
from kvhub.model.identify import identify
from kvhub_registry import Registry
from kvhub_registry.records import State

pytest.importorskip("sglang")


@dataclass
class Pair:
    """Two model directories, and a registry to put mappers between them into."""

    source: Path
    target: Path
    registry: Registry

    def register(self, seed: int = 0, state: State = State.READY, dtype: str = "float32") -> str:
        """The digest of a real artifact with random weights."""
        manifest = make_manifest(identify(self.source, dtype=dtype), identify(self.target, dtype=dtype))
        directory = self.source.parent / "mappers" / f"{seed}"
        manifest = write_artifact(directory, manifest, random_tensors(manifest, seed))
        self.registry.register(to_record(directory, manifest))
        self.registry.set_state(manifest.digest, state, "the gate says no")
        return manifest.digest


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    (tmp_path / "home").mkdir()
    registry = Registry.open(f"sqlite:///{tmp_path / 'home' / 'registry.db'}")
    return Pair(
        make_tiny(tmp_path / "little", seed=1),
        make_tiny(tmp_path / "big", seed=2, layers=4),
        registry,
    )


def serve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(["serve", "--dry-run", *arguments])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.err


def test_a_source_needs_no_mapper(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = serve(capsys, str(pair.source), "--port", "1234", "--", "--page-size", "16")
    assert code == 0
    assert f"--model-path {pair.source} " in said and "--port 1234 --dtype float32" in said
    assert said.rstrip().endswith("--page-size 16")


def test_a_dry_run_leaves_nothing_behind(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    serve(capsys, str(pair.source))
    assert not (tmp_path / "home" / "serving").exists()


@pytest.mark.parametrize("by", ["directory", "name", "digest"])
def test_a_ready_mapper_is_found(pair: Pair, capsys: pytest.CaptureFixture[str], by: str) -> None:
    mapper = pair.register()
    option = ("--mapper", mapper[:12]) if by == "digest" else ("--reuse-from", "little")
    option = ("--reuse-from", str(pair.source)) if by == "directory" else option
    code, said = serve(capsys, str(pair.target), *option)
    assert code == 0
    assert f"mapper {mapper[:12]} little -> big (ready)" in said


def test_no_mapper_is_not_found(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = serve(capsys, str(pair.target), "--reuse-from", "little")
    assert code == 3 and "no mapper from little to big" in said


def test_a_mapper_of_the_other_direction_is_not_taken(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    mapper = pair.register()
    assert serve(capsys, str(pair.source), "--mapper", mapper)[0] == 7
    assert serve(capsys, str(pair.source), "--reuse-from", "big")[0] == 3


def test_a_draft_needs_the_override(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    mapper = pair.register(state=State.DRAFT)
    code, said = serve(capsys, str(pair.target), "--reuse-from", "little")
    assert code == 7 and "the gate says no" in said and "--allow-draft" in said
    code, said = serve(capsys, str(pair.target), "--reuse-from", "little", "--allow-draft")
    assert code == 0 and f"mapper {mapper[:12]} little -> big (draft)" in said


def test_other_weights_under_the_same_name_are_refused(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair.register()
    other = make_tiny(tmp_path / "elsewhere" / "big", seed=3, layers=4)
    code, said = serve(capsys, str(other), "--reuse-from", "little")
    assert code == 7 and "was fitted for big at fingerprint:" in said


def test_the_mappers_dtype_is_served_and_another_refused(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.register(dtype="bfloat16")
    code, said = serve(capsys, str(pair.target), "--reuse-from", "little")
    assert code == 0 and "--dtype bfloat16" in said
    code, said = serve(capsys, str(pair.target), "--reuse-from", "little", "--", "--dtype", "float32")
    assert code == 7 and "was fitted for bfloat16" in said


def test_two_mappers_from_one_source_are_ambiguous(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = pair.register(1), pair.register(2)
    code, said = serve(capsys, str(pair.target), "--mapper", one, "--mapper", two)
    assert code == 2 and "two mappers from little" in said
    assert serve(capsys, str(pair.target), "--mapper", one, "--mapper", one)[0] == 0


@pytest.mark.parametrize("model", ["/nowhere", "x" * 10, "org/"])
def test_an_unknown_model_is_one_line(pair: Pair, capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, said = serve(capsys, model)
    assert code == 3 and said.startswith("Error: no such model")


def test_an_unknown_mapper(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(capsys, str(pair.target), "--mapper", digest("nothing"))[0] == 3


def test_a_damaged_mapper_is_refused_before_the_server_starts(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mapper = pair.register()
    weights = tmp_path / "mappers" / "0" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, said = serve(capsys, str(pair.target), "--mapper", mapper)
    assert code == 6 and "model.safetensors" in said


def test_a_mapper_swapped_for_another_is_refused(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one, _two = pair.register(1), pair.register(2)
    shutil.rmtree(tmp_path / "mappers" / "1")
    (tmp_path / "mappers" / "2").rename(tmp_path / "mappers" / "1")
    code, said = serve(capsys, str(pair.target), "--mapper", one)
    assert code == 6 and f"another mapper than {one[:12]}" in said


def test_a_port_in_use_is_said_before_anything_starts(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        code = run(["serve", str(pair.source), "--port", port])
    said = capsys.readouterr().err
    assert code == 2 and f"port {port} on 127.0.0.1 is in use" in said
    assert not (tmp_path / "home" / "serving").exists()


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_directory_with_files_of_others_is_no_exchange(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    thesis = tmp_path / "mine" / "Documents" / "thesis.odt"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    (tmp_path / "mine").chmod(0o700)
    code = run(["serve", *arguments, str(pair.source), "--exchange", str(tmp_path / "mine")])
    said = capsys.readouterr().err
    assert code == 2 and "holds something else: Documents" in said and "Hint: " in said
    assert list((tmp_path / "mine").iterdir()) == [thesis.parent]
    assert not (tmp_path / "home" / "serving").exists()


def test_the_settings_that_the_server_reads(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `kvhub serve` writes is what the extension accepts."""
    pair.register()
    started: list[object] = []
    monkeypatch.setattr("os.execve", lambda *arguments: started.append(arguments))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    memory = ["--heal", "--mapper-gib", "0.5"]
    options = ["--reuse-from", "little", "--worth", "always", "--exact-prefix", "4", "--native-tail", "32"]
    assert run(["serve", str(pair.target), "--port", port, *options, "--shadow", "0.5", *memory]) == 0
    assert started, capsys.readouterr().err
    from kvhub_sglang.settings import load_settings

    settings = load_settings({"KVHUB_SERVING": str(tmp_path / "home" / "serving" / f"{port}.json")})
    assert settings.worth == "always" and settings.heal and settings.shadow == 0.5
    assert settings.mapper_budget == 1 << 29
    [mapper] = settings.mappers
    assert (mapper.exact_prefix, mapper.native_tail) == (4, 32) and settings.cost_file is not None
