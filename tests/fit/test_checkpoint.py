"""Progress on disk: kill -9 at any moment, and the same command gives the same mapper."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from support.fitting import Pair, fork

from kvhub.cli import run
from kvhub.errors import BadInput, KvhubError
from kvhub.fit.checkpoint import Checkpoint, sealed
from kvhub.fit.moments import PairMoments
from kvhub.model.identity import Geometry

SHAPE = Geometry(num_layers=2, num_attention_heads=2, num_kv_heads=2, head_dim=8, hidden_size=8, k_norm=False)


def filled(
    windows: int, *, both: bool = True, start: PairMoments | None = None, skip: int = 0
) -> PairMoments:
    moments = start or PairMoments.zeros(SHAPE, SHAPE, both=both)
    for number in range(skip, windows):
        generator = torch.Generator().manual_seed(number)
        rows = [torch.randn(300, 32, generator=generator, dtype=torch.float64) for _ in range(4)]
        moments.add((rows[0], rows[1]), (rows[2], rows[3]))
    return moments


def state(moments: PairMoments) -> list[torch.Tensor]:
    return [getattr(side, n) for side in (moments.key, moments.value) for n in ("x", "y", "xx", "xy", "yy")]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("at", [1, 5, 6])
def test_moments_go_on_to_the_same_bits(tmp_path: Path, both: bool, at: int) -> None:
    whole = filled(9, both=both)
    with Checkpoint(tmp_path / "c", {"k": 2}).held() as checkpoint:
        checkpoint.save(filled(at, both=both), at)
        created = checkpoint.created
    with Checkpoint(tmp_path / "c", {"k": 2}).held() as again:
        assert (again.created, again.windows) == (created, at)
        resumed = PairMoments.zeros(SHAPE, SHAPE, both=both)
        assert again.restore(resumed) == at
        filled(9, start=resumed, skip=at)
    for moments in (whole, resumed):
        moments.flush()
    assert resumed.key.n == whole.key.n == 2700
    assert all(torch.equal(a, b) for a, b in zip(state(resumed), state(whole), strict=True))


def test_another_fit_s_checkpoint_is_refused_by_what_differs(tmp_path: Path) -> None:
    with Checkpoint(tmp_path, {"k": 2, "text": "a"}).held() as checkpoint:
        checkpoint.save(filled(2), 2)
    with (
        pytest.raises(BadInput, match=r"of another fit: its k is 2, not 4"),
        Checkpoint(tmp_path, {"k": 4, "text": "a"}).held(),
    ):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with (
        pytest.raises(BadInput, match=r"not a checkpoint: it holds 'thesis.txt'"),
        Checkpoint(tmp_path / "other", {"k": 4}).held(),
    ):
        pass
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_two_processes_do_not_share_one(tmp_path: Path) -> None:
    with (
        Checkpoint(tmp_path, {"k": 2}).held(),
        pytest.raises(KvhubError, match="another fit is at work"),
        Checkpoint(tmp_path, {"k": 2}).held(),
    ):
        pass


@pytest.mark.parametrize(
    "damage", ["flip", "cut", "absent", "state", "windows", "a name", "layers", "a directory"]
)
def test_what_is_damaged_is_not_used(tmp_path: Path, damage: str) -> None:
    with Checkpoint(tmp_path, {"k": 2}).held() as checkpoint:
        checkpoint.save(filled(2), 2)
    (file,) = tmp_path.glob("moments-*")
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
    elif damage == "cut":
        file.write_bytes(bytes(data[:-100]))
    elif damage == "absent":
        file.unlink()
    elif damage == "a directory":
        file.unlink()
        file.mkdir()
    elif damage in ("windows", "a name", "layers"):  # all else is as it was
        here = tmp_path / "state.json"
        old, new = {"windows": ('"windows":2', '"windows":3'), "a name": ('"k":2', '"j":2')}.get(
            damage, ('"schema_version"', '"layers":1,"schema_version"')
        )
        assert old in here.read_text()
        here.write_text(here.read_text().replace(old, new))
    else:
        (tmp_path / "state.json").write_text('{"schema_version": 1, "windows": "many"}')
    with Checkpoint(tmp_path, {"k": 2}).held() as again:
        assert again.damaged and again.windows == 0
        assert again.restore(PairMoments.zeros(SHAPE, SHAPE, both=True)) == 0
    assert not list(tmp_path.glob("moments-*"))


def test_a_directory_in_the_place_of_the_state_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "state.json").mkdir()
    with pytest.raises(BadInput, match="not a checkpoint"), Checkpoint(tmp_path, {"k": 2}).held():
        pass


def test_done_leaves_nothing_of_ours_and_all_of_others(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with Checkpoint(directory, {"k": 2}).held() as checkpoint:
        checkpoint.save(filled(2), 2)
        (directory / "notes").write_text("mine")
        checkpoint.remove()
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_what_is_refused_before_its_first_window_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    with pytest.raises(KvhubError), Checkpoint(directory, {"k": 2}).held():
        raise KvhubError("no memory")
    assert not directory.exists()
    with Checkpoint(directory, {"k": 2}).held() as checkpoint:
        checkpoint.save(filled(2), 2)
    with pytest.raises(KvhubError), Checkpoint(directory, {"k": 2}).held():
        raise KvhubError("interrupted")
    with Checkpoint(directory, {"k": 2}).held() as checkpoint:
        assert checkpoint.windows == 2


def digests(home: Path) -> dict[str, str]:
    return {
        path.name: json.loads((path / "manifest.json").read_bytes())["created"]
        for path in sorted((home / "mappers").iterdir())
    }


def test_kill_at_three_moments_and_the_digest_is_that_of_a_fit_in_one_piece(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    progress, log = tmp_path / "progress", tmp_path / "log"
    more = ["--both", "--checkpoint", str(progress), "--checkpoint-every", "2"]
    home = tmp_path / "killed"
    for wanted in (2, 10, 22):
        pid = fork(pair.arguments(*more), home, log)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [int(path.name[8:-12]) for path in progress.glob("moments-*")]
            if max(found, default=0) >= wanted:
                break
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), log.read_text()
        kept = json.loads((progress / "state.json").read_bytes())
    pid = fork(pair.arguments(*more), home, log)
    assert os.waitpid(pid, 0)[1] == 0, log.read_text()
    assert "going on after" in log.read_text()
    assert not progress.exists()
    assert list(digests(home).values()) == [kept["created"]] * 2

    # The same fit in one piece, told to have begun at the same time.
    calm, other = tmp_path / "calm", tmp_path / "other"
    other.mkdir()
    (other / "state.json").write_bytes(sealed({**kept, "windows": 0, "file": None}))
    pid = fork(pair.arguments("--both", "--checkpoint", str(other)), calm, log)
    assert os.waitpid(pid, 0)[1] == 0, log.read_text()
    assert digests(calm) == digests(home)


def test_killed_after_writing_with_output_it_finds_its_own_artifact(tmp_path: Path) -> None:
    """What is killed between the artifact's rename and the end still gives that artifact, and no error."""
    pair = Pair.make(tmp_path)
    progress, out = tmp_path / "progress", tmp_path / "out"
    given = pair.arguments("--output", str(out), "--checkpoint", str(progress), "--checkpoint-every", "4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "remove", lambda self: None)  # as if the power failed there
        assert run(given) == 0
    before = (out / "one--two--k2" / "manifest.json").read_bytes()
    assert run(given) == 0
    assert (out / "one--two--k2" / "manifest.json").read_bytes() == before
    assert not progress.exists() and [path.name for path in out.iterdir()] == ["one--two--k2"]
    assert run(given) == 2  # another fit now, and the place is taken


def test_the_command_refuses_a_checkpoint_of_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair.make(tmp_path)
    progress = tmp_path / "progress"
    with Checkpoint(progress, {"k": 2}).held():
        pass
    assert run(pair.arguments("--checkpoint", str(progress))) == 2
    error = capsys.readouterr().err
    assert "is of another fit" in error and "running" not in error
