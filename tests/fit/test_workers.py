"""Two processes of one fit, as torchrun starts them: the same bits as one."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from support.fitting import Pair, fork

from kvhub.cli import run


def team(arguments: list[str], home: Path, root: Path, size: int) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        fork(
            arguments,
            home,
            root / f"log{rank}",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        for rank in range(size)
    ]


def until_saved(progress: Path) -> None:
    """Until there is something to go on from."""
    state, deadline = progress / "state.json", time.monotonic() + 60
    while time.monotonic() < deadline:
        if state.exists() and json.loads(state.read_bytes())["windows"]:
            return
        time.sleep(0.001)


def weights(home: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in home.glob("mappers/*/model.safetensors"))


def test_two_processes_give_the_bits_of_one_and_survive_a_kill(
    tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair.make(tmp_path)
    assert run(pair.arguments("--both", "--sequences", "23")) == 0
    capsys.readouterr()
    alone = weights(kvhub_home)
    assert len(alone) == 2

    home, progress = tmp_path / "team", tmp_path / "progress"
    given = pair.arguments(
        "--both", "--sequences", "23", "--checkpoint", str(progress), "--checkpoint-every", "4"
    )
    processes = team(given, home, tmp_path, 2)
    until_saved(progress)
    for pid in processes:
        os.kill(pid, 9)
    assert all(os.WIFSIGNALED(os.waitpid(pid, 0)[1]) for pid in processes)

    for pid in team(given, home, tmp_path, 2):
        assert os.waitpid(pid, 0)[1] == 0, (tmp_path / "log0").read_text()
    assert weights(home) == alone
    log = (tmp_path / "log0").read_text()
    assert "going on after" in log and "next     kvhub eval" in log
    second = (tmp_path / "log1").read_text()
    assert "digest" not in second and "running" not in second


def test_a_team_s_progress_can_be_finished_alone(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    progress, log = tmp_path / "progress", tmp_path / "log"
    given = pair.arguments("--checkpoint", str(progress), "--checkpoint-every", "3")
    processes = team(given, tmp_path / "home", tmp_path, 3)
    until_saved(progress)
    for pid in processes:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    for home, more in ((tmp_path / "home", given), (tmp_path / "other", pair.arguments())):
        assert os.waitpid(fork(more, home, log), 0)[1] == 0, log.read_text()
    assert weights(tmp_path / "home") == weights(tmp_path / "other") != []
