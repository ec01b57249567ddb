"""From what a user types to a loaded model, and one-line errors on the way."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from kvhub.errors import BadInput, Corrupt, NotFound, Unreachable
from kvhub.model.load import load_model, resolve


def test_load_keeps_the_config_dtype_or_takes_the_given_one(tmp_path):
    path = make_tiny(tmp_path / "m", dtype="bfloat16")
    assert load_model(path).identity.dtype == "bfloat16"
    loaded = load_model(str(path), torch.float32)
    assert (loaded.identity.dtype, loaded.model.dtype) == ("float32", torch.float32)
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


@pytest.mark.parametrize("ref", ["./absent", "/no/such/dir", "a/b/c", "name", "", "../x/y", "org/na me"])
def test_no_such_directory(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((NotFound, BadInput)) as caught:
        resolve(ref if ref else "nothing")
    assert "\n" not in caught.value.message


def test_a_file_and_a_revision_of_a_directory(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(BadInput, match="is a file"):
        resolve(str(file))
    with pytest.raises(BadInput, match="no revision"):
        resolve(str(tmp_path), revision="main")
    assert resolve(str(tmp_path)) == tmp_path


def test_hub_out_of_reach(tmp_path):
    """A port where nobody listens: a fresh process, because the client reads its endpoint on import."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        code = (
            "from kvhub.model.resolve import resolve\nfrom kvhub.errors import Unreachable\n"
            "try: resolve('org/name@main')\n"
            "except Unreachable as error: print('refused:', error.message)"
        )
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "PATH": ""}
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
        )
    assert found.stdout.startswith("refused:"), found.stderr
    assert Unreachable.exit_code == 5


def test_truncated_weights(tmp_path):
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Corrupt):
        load_model(path)


def test_an_absent_weight_is_not_replaced_by_random_numbers(tmp_path):
    path = make_tiny(tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Corrupt, match=r"layers\.1\.mlp\.up_proj"):
        load_model(path)
