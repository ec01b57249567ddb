"""Captures on disk: the same bits as a forward, reused by later fits, never both models in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.fitting import Pair
from support.tiny import make_tiny

import kvhub.model.load as loading
from kvhub.cli import run
from kvhub.errors import KvhubError
from kvhub.fit.capture import capture
from kvhub.fit.captures import CaptureStore, demand_disk
from kvhub.fit.memory import held
from kvhub.model.load import load_model

IDS = torch.arange(64) * 7 % 320


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_capture_is_the_capture(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_model(make_tiny(tmp_path / "m"), dtype)
    store = CaptureStore(tmp_path / "captures", model.identity)
    store.prepare()
    assert store.get(IDS) is None
    size = store.bytes_missing([IDS])
    found = capture(model, IDS)
    store.put(IDS, found)
    kept = store.get(IDS)
    assert kept is not None
    for name in ("content_keys", "keys", "values"):
        for a, b in zip(getattr(kept, name), getattr(found, name), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)
    assert store.bytes_missing([IDS]) == 0
    assert size < store.path(IDS).stat().st_size < size + 1000
    assert store.get(IDS[:63]) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "text"])
def test_a_damaged_capture_is_none(tmp_path: Path, damage: str) -> None:
    model = load_model(make_tiny(tmp_path / "m"), torch.float32)
    store = CaptureStore(tmp_path / "captures", model.identity)
    store.prepare()
    store.put(IDS, capture(model, IDS))
    path = store.path(IDS)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-10] ^= 1
    path.write_bytes(b"no tensors" if damage == "text" else bytes(data[:-8] if damage == "cut" else data))
    assert store.get(IDS) is None


def test_a_directory_where_a_capture_belongs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, captures = Pair.make(tmp_path), tmp_path / "captures"
    given = pair.arguments("--captures", str(captures))
    assert run(given) == 0
    path = sorted(captures.glob("*/*.safetensors"))[0]
    path.unlink()
    path.mkdir()
    assert run(given) == 2
    error = capsys.readouterr().err
    assert f"{path.name} is a directory, not a capture" in error
    assert "remove it, or give another --captures" in error


def test_another_model_s_captures_are_never_taken(tmp_path: Path) -> None:
    one, other = (load_model(make_tiny(tmp_path / str(seed), seed=seed), torch.float32) for seed in (0, 1))
    stores = [CaptureStore(tmp_path / "captures", model.identity) for model in (one, other)]
    for store in stores:
        store.prepare()
    stores[0].put(IDS, capture(one, IDS))
    stores[0].path(IDS).rename(stores[1].path(IDS))
    assert stores[1].get(IDS) is None


def test_a_full_disk_is_found_before_any_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    model = load_model(make_tiny(tmp_path / "m"), torch.float32)
    store = CaptureStore(tmp_path / "captures", model.identity)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=store.bytes_missing([IDS])))
    demand_disk([store], [IDS])
    with pytest.raises(KvhubError, match="captures take"):
        demand_disk([store], [IDS, IDS[1:]])


def weights(home: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in sorted(home.glob("mappers/*/model.safetensors"))}


def test_low_memory_and_captures_give_the_same_weights_and_later_fits_run_no_model(
    tmp_path: Path, kvhub_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil
    import weakref

    pair = Pair.make(tmp_path)
    assert run(pair.arguments("--both")) == 0
    plain = sorted(weights(kvhub_home).values())
    shutil.rmtree(kvhub_home)

    alive: list[weakref.ref[object]] = []
    most = 0
    real = loading._weights

    def watched(path: Path, *how: object) -> object:
        nonlocal most
        model = real(path, *how)
        alive.append(weakref.ref(model))
        most = max(most, sum(one() is not None for one in alive))
        return model

    monkeypatch.setattr(loading, "_weights", watched)
    captures = tmp_path / "captures"
    assert run(pair.arguments("--both", "--low-memory", "--captures", str(captures))) == 0
    assert (most, len(alive)) == (1, 2)
    assert sorted(weights(kvhub_home).values()) == plain
    assert "running the source: 27/27" in capsys.readouterr().err

    # Another k and lambda of the same text: from the captures alone.
    assert run(pair.arguments("--k", "1", "--lambda", "paper", "--captures", str(captures))) == 0
    assert len(alive) == 2 and len(weights(kvhub_home)) == 3
    # One that is damaged is captured again.
    for path in list(captures.glob("*/*.safetensors"))[:1]:
        path.write_bytes(b"")
    assert run(pair.arguments("--k", "3", "--captures", str(captures))) == 0
    assert len(alive) == 3

    # Without a place of their own they are gone with the checkpoint.
    assert run(pair.arguments("--k", "1", "--low-memory")) == 0
    assert not list(kvhub_home.glob("cache/fits/*"))


def test_memory_is_printed_and_what_cannot_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair.make(tmp_path)
    assert run(pair.arguments("--max-memory", "0.3")) == 2
    error = capsys.readouterr().err
    assert "0.3 GB may be used" in error and "--low-memory" in error and "running" not in error
    assert run(pair.arguments()) == 0
    said = re.search(r"memory: ([0-9.]+) GB at the peak, while it", capsys.readouterr().err)
    assert said and float(said[1]) * 1e9 > held() - 5e6


def test_preparing_leaves_what_a_living_process_writes(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path / "captures", load_model(make_tiny(tmp_path / "m")).identity)
    store.prepare()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living, killed, old = (
        store.directory / f".writing-{name}" for name in (f"{os.getppid()}-a", f"{gone.pid}-a", "a")
    )
    for path in (living, killed, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.prepare()
    assert living.exists() and not killed.exists() and not old.exists()


@pytest.mark.parametrize("amount", ["nan", "inf", "1e300"])
def test_memory_that_is_no_number_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], amount: str
) -> None:
    assert run(Pair.make(tmp_path).arguments("--max-memory", amount)) == 2
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--output", "--checkpoint", "--captures"])
def test_a_file_where_a_directory_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    (tmp_path / "file").write_text("x")
    assert run(Pair.make(tmp_path).arguments(option, str(tmp_path / "file"))) == 2
    error = capsys.readouterr().err
    assert "is a file, not a directory" in error and f"give another {option}" in error
