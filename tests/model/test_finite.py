"""NaN and infinity in weights: found before anything is fitted, wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.cli import run
from kvhub.errors import BadInput, Corrupt
from kvhub.model import finite
from kvhub.model.finite import demand_finite
from kvhub.model.load import load_model

FIT = ["--length", "64", "--sequences", "24", "--k", "1", "--recipe", "ridge"]


def spoil(path: Path, name: str, value: float, *, file: str = "model.safetensors") -> Path:
    """The last number of one weight becomes `value`."""
    tensors = load_file(path / file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, path / file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ],
)
def test_what_a_fit_would_not_read(
    tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str], name: str, value: float
) -> None:
    source = make_tiny(tmp_path / "one")
    target = spoil(make_tiny(tmp_path / "two", layers=3, seed=1, tie_word_embeddings=False), name, value)
    text = write_text(tmp_path / "text.txt", 200)
    for pair in ((source, target), (target, source)):
        assert run(["fit", *map(str, pair), "--text", str(text), *FIT]) == 6
        errors = capsys.readouterr().err.splitlines()[-2:]
        assert errors[0] == f"Error: {target / 'model.safetensors'}: {name} holds NaN or infinity"
        assert errors[1].startswith("Hint: download the model again")
    assert not (kvhub_home / "mappers").exists() and not (kvhub_home / "cache" / "fits").exists()
    with pytest.raises(Corrupt, match="holds NaN or infinity"):
        load_model(target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_piece_of_every_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(finite, "PIECE", 64)
    path = make_tiny(tmp_path / "m", dtype=dtype)
    demand_finite(path)
    file = path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.1.mlp.gate_proj.weight"
    for index in (0, 31, 32, 1000, whole[name].numel() - 1):
        for value in (torch.nan, torch.inf):
            tensors = {key: tensor.clone() for key, tensor in whole.items()}
            tensors[name].view(-1)[index] = value
            save_file(tensors, file, metadata={"format": "pt"})
            with pytest.raises(Corrupt, match="gate_proj"):
                demand_finite(path)


def test_a_sum_that_overflows_acquits(tmp_path: Path) -> None:
    for dtype, largest in (("float32", 3.0e38), ("bfloat16", 3.0e38), ("float16", 6.0e4)):
        path = make_tiny(tmp_path / dtype, dtype=dtype)
        file = path / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"].fill_(largest)
        save_file(tensors, file, metadata={"format": "pt"})
        demand_finite(path)


def test_numbers_that_only_the_dtype_asked_for_cannot_hold(tmp_path: Path) -> None:
    path = spoil(make_tiny(tmp_path / "m"), "model.norm.weight", 1e5)
    demand_finite(path, torch.float32)
    demand_finite(path, torch.bfloat16)
    with pytest.raises(BadInput, match="holds numbers that float16 cannot") as caught:
        load_model(path, torch.float16)
    assert caught.value.hint == "use --dtype bfloat16 or float32"


def test_no_hint_names_a_dtype_that_cannot_hold_them_either(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m", tie_word_embeddings=False)
    name = "model.layers.1.self_attn.k_proj.weight"
    spoil(path, name, 3.4e38)  # bfloat16 ends at 3.39e38
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(BadInput, match=f"{name} holds numbers that") as caught:
            demand_finite(path, dtype)
        assert caught.value.hint == "use --dtype float32"
    demand_finite(path, torch.float32)
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[name].double() * 10
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match="holds numbers that float32 cannot") as caught:
        demand_finite(path, torch.float32)
    assert caught.value.hint == "its numbers are too large for every --dtype"


def test_each_file_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(tmp_path / "m", shard="40KB", layers=4)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 1
    looked: list[Path] = []
    real = finite._demand
    monkeypatch.setattr(finite, "_demand", lambda file, kind: (looked.append(file), real(file, kind)))
    demand_finite(path)
    demand_finite(path)
    assert looked == files
    name = next(iter(load_file(files[1])))
    spoil(path, name, torch.nan, file=files[1].name)
    with pytest.raises(Corrupt, match="holds NaN"):
        demand_finite(path)
