"""Through each foreign layout and back: the mapped cache stays, and nothing hostile comes in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.write import write_artifact
from kvhub.catalog import find
from kvhub.errors import BadInput, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.interop.convert import LAYOUTS, export_mapper, import_mapper, recognise
from kvhub.mapper.base import SourceRows
from kvhub.mapper.load import load_mapper
from kvhub.settings import Settings
from kvhub_registry import State

SOURCE = make_identity("org/small", num_layers=4)
TARGET = make_identity("org/large", num_layers=3)
ORDER = [[0, 2], [1, 3], [0, 3]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    return Settings.load()


def made(path: Path, support: str = "full", **changes: object) -> Manifest:
    manifest = make_manifest(SOURCE, TARGET, k=2, support=support, source_layers=ORDER, **changes)
    return write_artifact(path, manifest, random_tensors(manifest))


def mapped(path: Path) -> list[torch.Tensor]:
    """Every layer of a mapped cache, for fixed source rows."""
    generator = torch.Generator().manual_seed(7)
    keys, values = (
        [torch.randn(6, 2, 4, generator=generator) for _ in range(SOURCE.geometry.num_layers)] for _ in "kv"
    )
    rows = SourceRows(keys, values, torch.arange(6), SOURCE.rope)
    mapper = load_mapper(path)
    return [side for t in range(TARGET.geometry.num_layers) for side in mapper.map_layer(t, rows)]


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_round_trip(home: Settings, tmp_path: Path, layout: str, support: str) -> None:
    made(tmp_path / "ours", support)
    export_mapper(tmp_path / "ours", tmp_path / "theirs", layout)
    assert recognise(tmp_path / "theirs") == layout
    place, manifest = import_mapper(tmp_path / "theirs", SOURCE, TARGET)
    for ours, back in zip(mapped(tmp_path / "ours"), mapped(place), strict=True):
        torch.testing.assert_close(ours, back, rtol=1e-6, atol=1e-5)
    row = find(manifest.digest)
    assert (row.state, row.scores, manifest.support) == (State.DRAFT, (), "full")
    assert "imported" in manifest.calibration.dataset


def test_a_bfloat16_mapper_keeps_its_numbers(home: Settings, tmp_path: Path) -> None:
    made(tmp_path / "ours", weights_dtype="bfloat16")
    export_mapper(tmp_path / "ours", tmp_path / "theirs", "kvtransfer")
    place, _ = import_mapper(tmp_path / "theirs", SOURCE, TARGET)
    for ours, back in zip(mapped(tmp_path / "ours"), mapped(place), strict=True):
        torch.testing.assert_close(ours, back, rtol=1e-6, atol=1e-5)


def test_best_first_order_of_source_layers(home: Settings, tmp_path: Path) -> None:
    """Others list the best source layer first; the blocks of rows must follow into ascending order."""
    made(tmp_path / "ours")
    export_mapper(tmp_path / "ours", tmp_path / "theirs", "kvtransfer")
    tensors = load_file(tmp_path / "theirs" / "mapper.safetensors")
    swapped = {
        name: torch.cat([tensor[8:], tensor[:8]]).contiguous() if ".W." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(swapped, tmp_path / "theirs" / "mapper.safetensors")
    content = json.loads((tmp_path / "theirs" / "mapper.json").read_text())
    content["selected"] = [chosen[::-1] for chosen in content["selected"]]
    (tmp_path / "theirs" / "mapper.json").write_text(json.dumps(content))
    place, manifest = import_mapper(tmp_path / "theirs", SOURCE, TARGET)
    assert manifest.source_layers == ORDER
    for ours, back in zip(mapped(tmp_path / "ours"), mapped(place), strict=True):
        torch.testing.assert_close(ours, back, rtol=1e-6, atol=1e-5)


def test_the_files_are_what_their_readers_ask_for(tmp_path: Path) -> None:
    """Names, shapes, dtypes and checksums, from the other projects' own loaders."""
    made(tmp_path / "ours")
    for layout in LAYOUTS:
        export_mapper(tmp_path / "ours", tmp_path / layout, layout)
    router = tmp_path / "semantic-router"
    content = json.loads((router / "manifest.json").read_text())
    assert content["compatibility"]["source_revision"] == "a" * 40
    assert content["source_layers_per_target"]["k"] == {"0": [0, 2], "1": [1, 3], "2": [0, 3]}
    lines = dict(line.split()[::-1] for line in (router / "SHA256SUMS").read_text().splitlines())
    assert lines == {
        name: hashlib.sha256((router / name).read_bytes()).hexdigest()
        for name in ("manifest.json", "weights.safetensors")
    }
    weights = load_file(router / "weights.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        f"target.{t}.{side}.{part}": (16, 8) if part == "W" else (8,)
        for t in range(3)
        for side in "kv"
        for part in "Wb"
    }
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert load_file(tmp_path / "veloxquant" / "mapper.safetensors")["0.w_k"].shape == (2, 16, 4)
    spec = json.loads((tmp_path / "kvtransfer" / "mapper.json").read_text())["source"]
    assert set(spec) == {"name", "n_layers", "n_kv", "head_dim", "rope_theta", "attention_scaling"}


def test_what_a_layout_cannot_say(tmp_path: Path) -> None:
    made(tmp_path / "prefix", exact_prefix=4)
    with pytest.raises(Incompatible) as caught:
        export_mapper(tmp_path / "prefix", tmp_path / "out", "kvtransfer")
    assert caught.value.code == "exact_prefix"
    export_mapper(tmp_path / "prefix", tmp_path / "out", "kvtransfer", drop_exact_prefix=True)
    with pytest.raises(BadInput):
        export_mapper(tmp_path / "prefix", tmp_path / "out", "kvtransfer", drop_exact_prefix=True)
    normed = make_identity("org/large", num_layers=3, k_norm=True)
    manifest = make_manifest(SOURCE, normed, k=2, source_layers=ORDER, family="ridge-k-norm")
    write_artifact(tmp_path / "normed", manifest, random_tensors(manifest))
    for layout in LAYOUTS:
        with pytest.raises(Incompatible, match=r"target's k_norm; .* cannot say so") as caught:
            export_mapper(tmp_path / "normed", tmp_path / "no", layout)
        assert caught.value.code == "family" and "--normalise-keys off" in (caught.value.hint or "")
    manifest = make_manifest(SOURCE, make_identity("org/wide", head_dim=8))
    write_artifact(tmp_path / "wide", manifest, random_tensors(manifest))
    with pytest.raises(Incompatible) as caught:
        export_mapper(tmp_path / "wide", tmp_path / "no", "semantic-router")
    assert caught.value.code == "geometry"
    assert not (tmp_path / "no").exists()


def test_the_wrong_models_are_refused(home: Settings, tmp_path: Path) -> None:
    made(tmp_path / "ours")
    wrong = [make_identity("org/other", num_layers=3, head_dim=8), make_identity("org/deep", num_layers=7)]
    for layout in LAYOUTS:
        export_mapper(tmp_path / "ours", tmp_path / layout, layout)
        for other in wrong:
            with pytest.raises((Incompatible, Corrupt)):
                import_mapper(tmp_path / layout, SOURCE, other)
    moved = TARGET.model_copy(update={"revision": "commit:" + "b" * 40})
    with pytest.raises(Incompatible) as caught:
        import_mapper(tmp_path / "semantic-router", SOURCE, moved)
    assert caught.value.code == "target_identity"
    vocabulary = TARGET.model_copy(update={"tokenizer": "e" * 64})
    with pytest.raises(Incompatible):
        import_mapper(tmp_path / "kvtransfer", SOURCE, vocabulary)
    with pytest.raises(NotFound):
        recognise(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput):
        recognise(tmp_path / "empty")


def test_damage_and_hostile_files(home: Settings, tmp_path: Path) -> None:
    made(tmp_path / "ours")
    for layout in LAYOUTS:
        good = tmp_path / layout
        export_mapper(tmp_path / "ours", good, layout)
        for path in sorted(good.iterdir()):
            data = path.read_bytes()
            for broken in (b"", data[: len(data) // 2], b"\xff" + data, b"{}", data.replace(b"0", b"[", 3)):
                path.write_bytes(broken)
                with pytest.raises(KvhubError):
                    import_mapper(good, SOURCE, TARGET)
            path.unlink()
            path.symlink_to("/etc/hostname")
            with pytest.raises(KvhubError):
                import_mapper(good, SOURCE, TARGET, layout=layout)
            path.unlink()
            path.write_bytes(data)
        import_mapper(good, SOURCE, TARGET)
    store = {path.name for path in home.mappers.iterdir()}
    assert all(name == ".lock" or len(name) == 64 for name in store)


def test_numbers_that_are_none(home: Settings, tmp_path: Path) -> None:
    made(tmp_path / "ours")
    export_mapper(tmp_path / "ours", tmp_path / "theirs", "kvtransfer")
    tensors = load_file(tmp_path / "theirs" / "mapper.safetensors")
    tensors["K.W.0"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "theirs" / "mapper.safetensors")
    with pytest.raises(Corrupt, match="NaN"):
        import_mapper(tmp_path / "theirs", SOURCE, TARGET)


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    made(tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    export_mapper(tmp_path / "ours", tmp_path / "empty", "kvtransfer")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "full", "link"):
        with pytest.raises(BadInput, match="exists already") as caught:
            export_mapper(tmp_path / "ours", tmp_path / name, "kvtransfer")
        assert caught.value.hint
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_neither_way_holds_more_than_a_tensor(home: Settings, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Tensors that are alive at once, of those that were read: two to put one into another form."""
    import weakref

    from kvhub.interop import dense, streaming

    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = []
    real = streaming.read_tensor

    def watched(path: Path, name: str) -> torch.Tensor:
        most.append(len(alive))
        tensor = real(path, name)
        alive.add(tensor)
        return tensor

    for module in (streaming, dense):
        monkeypatch.setattr(module, "read_tensor", watched)
    made(tmp_path / "ours")
    monkeypatch.setattr("kvhub.artifact.write.SHARD_BYTES", 1000)  # a shard is what the writer holds
    for layout in LAYOUTS:
        export_mapper(tmp_path / "ours", tmp_path / layout, layout)
        assert max(most) <= 1, layout
        import_mapper(tmp_path / layout, SOURCE, TARGET)
        assert max(most) <= 4, layout  # of one shard: K and V of a layer, weight and bias
        most.clear()
