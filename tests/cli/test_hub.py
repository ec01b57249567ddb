"""push and pull as a user runs them, over the loopback Hub."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from loopback_hub import LoopbackHub
from starlette.requests import Request
from starlette.responses import Response
from support.published import publishable

from kvhub.catalog import open_registry, register
from kvhub_registry import State

REPO = "tester/mapper"


def elsewhere(shell, tmp_path: Path):  # type: ignore[no-untyped-def]
    """The same shell in another, empty home."""
    return type(shell)(
        shell.environment | {"KVHUB_HOME": str(tmp_path / "home2"), "HF_HOME": str(tmp_path / "hf2")}
    )


def leftovers(home: Path) -> list[str]:
    return sorted(item.name for item in (home / "mappers").glob("*") if item.name != ".lock")


def test_push_pull_verify_into_an_empty_home(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    register(tmp_path / "made", manifest, shell.settings)
    pushed = shell.process("push", manifest.digest[:10], REPO, "--tag", "v1", "--license", "apache-2.0")
    assert pushed.stdout.startswith(f"{REPO}@{hub.store.repos[REPO].tags['v1']} (v1)")

    other = elsewhere(shell, tmp_path)
    pulled = other.process("pull", f"{REPO}@v1")
    assert pulled.stdout.split()[0] == manifest.digest
    assert "every sha256 agrees" in other.process("verify", REPO, "--deep").stdout
    (row,) = json.loads(other.process("list", "--format", "json").stdout)
    assert (row["state"], row["aliases"]) == ("ready", [REPO, f"{REPO}@v1"])
    assert row["locations"] == [
        {"repo_id": REPO, "commit": hub.store.repos[REPO].tags["v1"], "pushed": False}
    ]


def test_exit_codes_of_the_hub(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", "tester/mapper")
    shell.run("push", tmp_path / "made", "somebody/mapper", code=4)
    shell.run("pull", "tester/absent", code=3)
    shell.run("pull", REPO + "@v9", code=3)
    wrong = shell.run("pull", REPO, code=4, HF_TOKEN="hf_verysecret")
    assert "hf_verysecret" not in wrong.stderr
    hub.store.repos[REPO].gated = True
    assert "gated" in shell.run("pull", REPO, code=4, HF_TOKEN="").stderr
    assert "offline" in shell.run("pull", REPO, code=5, HF_HUB_OFFLINE="1").stderr
    assert leftovers(shell.settings.home) == []


def stalled(
    hub: LoopbackHub, method: str = "GET", hang: Callable[[], object] = lambda: time.sleep(1)
) -> threading.Event:
    """Make the transfer of weights hang; the event is set once one has begun."""
    begun = threading.Event()

    def stall(request: Request) -> Response | None:
        if request.method == method and "/_blobs/" in request.url.path:
            begun.set()
            hang()
        return None

    hub.faults.append(stall)
    return begun


def test_a_killed_pull_leaves_no_row_and_the_next_one_cleans_up(
    shell, hub: LoopbackHub, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    begun = stalled(hub)
    process = shell.start("pull", REPO)
    assert begun.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    hub.faults.clear()
    with open_registry(shell.settings) as registry:
        assert registry.list() == []
    assert any(name.startswith(".pull-") for name in leftovers(shell.settings.home))
    shell.run("pull", REPO)
    assert leftovers(shell.settings.home) == [manifest.digest]


def test_ctrl_c_in_a_pull_leaves_nothing(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    begun = stalled(hub)
    process = shell.start("pull", REPO)
    assert begun.wait(60)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert leftovers(shell.settings.home) == []


def test_ctrl_c_in_a_push_does_not_wait_for_the_upload(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "made")
    go_on = threading.Event()
    begun = stalled(hub, "PUT", lambda: go_on.wait(60))
    process = shell.start("push", tmp_path / "made", REPO)
    try:
        assert begun.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)  # while the upload still hangs
        assert not go_on.is_set()
    finally:
        process.kill()
        go_on.set()
    assert process.returncode == 130 and "Traceback" not in err, err


def test_a_flipped_byte_comes_with_what_to_do(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    blob = hub.store.lfs / str(hub.store.repos[REPO].head.tree["model.safetensors"].lfs)
    blob.write_bytes(blob.read_bytes()[:-1] + b"\xff")
    assert "Hint: pull again" in shell.run("pull", REPO, code=6).stderr


def test_two_pulls_at_once(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    for process in [shell.start("pull", REPO) for _ in range(2)]:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    with open_registry(shell.settings) as registry:
        (row,) = registry.list()
        assert row.state is State.READY
    assert leftovers(shell.settings.home) == [manifest.digest]
    shell.run("verify", manifest.digest, "--deep")


def test_a_full_disk_is_one_line_and_leaves_nothing(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The kernel refuses to write on (a limit on file size stands in for a full disk)."""
    publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    shell.run("list")
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "import kvhub.hub.pull, huggingface_hub.file_download;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
        "from kvhub.cli import main; main(['pull', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, REPO],
        env=shell.environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[0] == "Error: the disk is full"
    assert leftovers(shell.settings.home) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000
