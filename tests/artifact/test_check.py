"""`check_tensors` refuses what `open_tensors` refuses, without torch and without holding the tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact import open as opening
from kvhub.artifact.open import check_tensors, open_tensors
from kvhub.artifact.write import write_artifact
from kvhub.errors import Corrupt

SEAM = 64 // 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, SEAM - 1, SEAM, -1])
def test_one_bad_number_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, value: float, place: int
) -> None:
    monkeypatch.setattr(opening, "BLOCK", 64)  # so that a tensor is several blocks
    manifest = make_manifest(make_identity(), make_identity(), weights_dtype=dtype)
    manifest = write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    check_tensors(tmp_path / "m", manifest)
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors["layers.1.v.weight"].view(-1)[place] = value
    save_file(tensors, path)
    for check in (check_tensors, open_tensors):
        with pytest.raises(Corrupt, match="NaN or infinite"):
            check(tmp_path / "m", manifest)


def test_largest_and_smallest_numbers_are_fine(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        manifest = make_manifest(make_identity(), make_identity(), weights_dtype=dtype)
        tensors = random_tensors(manifest)
        limits = torch.finfo(getattr(torch, dtype))
        tensors["layers.0.k.weight"][0, :4] = torch.tensor([limits.max, limits.min, limits.tiny, -0.0])
        manifest = write_artifact(tmp_path / dtype, manifest, tensors)
        check_tensors(tmp_path / dtype, manifest)


def test_without_torch(tmp_path: Path) -> None:
    manifest = make_manifest(make_identity(), make_identity())
    write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    code = (
        "import sys; from pathlib import Path; from kvhub.artifact.open import check_tensors;"
        "from kvhub.artifact.read import read_manifest; p = Path(sys.argv[1]);"
        "check_tensors(p, read_manifest(p)); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
