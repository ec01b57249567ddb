"""Commands killed with -9 at a random moment, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

from loopback_hub import LoopbackHub
from support.published import publishable
from support.stored import stored

from kvhub.artifact.read import read_manifest, verify_artifact
from kvhub.catalog import open_registry
from kvhub.settings import Settings
from kvhub.store import origin
from kvhub.store.collect import collect
from kvhub.store.lifecycle import retire
from kvhub.store.recover import unregistered
from kvhub_registry import State
from kvhub_registry.version import HEAD, VERSION_TABLE

REPO = "tester/mapper"

ZYGOTE = """
import json, os, sys, warnings
import kvhub.cli, kvhub.catalog, kvhub.hub.pull, kvhub.hub.push, kvhub.store.collect, kvhub_registry.registry
import huggingface_hub.file_download, huggingface_hub._commit_api, matplotlib.figure, alembic.config
for name in sys.argv[1:]:
    __import__(name)
for line in sys.stdin:
    arguments, errors = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(out, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os._exit(kvhub.cli.run(arguments))
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""Has everything imported and forks for each command, so that a kill meets the work and not the imports."""


class Killing:
    """One home and one Hub that live through everything."""

    def __init__(self, root: Path, hub: LoopbackHub, *, fit: bool = False) -> None:
        self.root, self.hub = root, hub
        self.settings = Settings(root / "home", f"sqlite:///{root}/home/registry.db", False)
        tests = Path(__file__).parents[1]
        self.environment = {
            **{key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ},
            **hub.environment,
            "KVHUB_HOME": str(self.settings.home),
            "HF_HOME": str(root / "hf"),
            "HOME": str(root),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        }
        self.errors = root / "errors.txt"
        libraries = ["torch", "transformers", "kvhub.fit.command", "kvhub.model.load"] if fit else []
        self.zygote = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE, *libraries],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.usual: dict[str, float] = {}
        self.seed = 0
        self.known: dict[str, str] = {}
        publishable(root / "made")
        stored(self.settings, 1)
        self.run("push", self.arguments("push"))
        if fit:
            from support.tiny import make_tiny

            make_tiny(root / "small", layers=2)
            make_tiny(root / "large", layers=3, seed=1)

    def arguments(self, kind: str) -> list[str]:
        """The command of a kind, prepared so that it has work to do."""
        if kind == "pull":
            with open_registry(self.settings) as registry:
                head = read_manifest(self.root / "made").digest
                for row in registry.list():
                    # a row that was put back does not know any more that it was pulled
                    if row.digest == head or (row.locations and not any(p.pushed for p in row.locations)):
                        registry.remove(row.digest)
                        shutil.rmtree(row.path, ignore_errors=True)
            shutil.rmtree(self.settings.home / "blobs", ignore_errors=True)
            return ["pull", REPO]
        if kind == "push":
            self.seed += 1
            shutil.rmtree(self.root / "made")
            publishable(self.root / "made", seed=self.seed % 50 + 5)
            return ["push", str(self.root / "made"), REPO]
        if kind == "gc":
            for seed in (51, 52, 53):
                retire(stored(self.settings, seed).digest, why="for gc", settings=self.settings)
            return ["gc", "--grace", "0"]
        database = self.settings.home / "registry.db"
        if kind == "migrate":  # as the version before had it, with all that is registered
            assert HEAD == "0002", "undo the newer migrations, too"
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("DROP TABLE kvhub_event")
                connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
            self.known = self.states()
            assert self.known
            return ["list"]
        if kind == "create":
            for part in ("", "-wal", "-shm"):
                Path(f"{database}{part}").unlink(missing_ok=True)
            return ["list"]
        text = Path(__file__).parents[2] / "demo" / "text" / "wikipedia.txt"
        sizes = ["--k", "1", "--length", "64", "--sequences", "40", "--recipe", "ridge"]
        return ["fit", str(self.root / "small"), str(self.root / "large"), "--text", str(text), *sizes]

    def states(self) -> dict[str, str]:
        """State by digest, read without opening the registry, which would upgrade it."""
        with closing(sqlite3.connect(self.settings.home / "registry.db")) as connection:
            return dict(connection.execute("SELECT mapper_digest, state FROM kvhub_artifact"))

    def close(self) -> None:
        """End the process that forks."""
        self.zygote.communicate()

    def start(self, arguments: list[str]) -> int:
        """A command in a process of its own; returns its id."""
        assert self.zygote.stdin is not None
        self.zygote.stdin.write(json.dumps([arguments, str(self.errors)]) + "\n")
        self.zygote.stdin.flush()
        return int(self.answer())

    def answer(self) -> str:
        """The next line of the process that forks: an id, or how a command ended."""
        assert self.zygote.stdout is not None
        return self.zygote.stdout.readline()

    def run(self, kind: str, arguments: list[str]) -> None:
        """To the end, noting how long it takes."""
        self.start(arguments)
        begun = time.monotonic()
        status = int(self.answer())
        self.usual[kind] = time.monotonic() - begun
        assert status == 0, f"{arguments[0]}: {self.errors.read_text()[-500:]}"

    def kill(self, kind: str, draw: random.Random) -> bool:
        """Once, and check everything. Returns whether it was still running. Raises `AssertionError`."""
        if kind not in self.usual:
            self.run(kind, self.arguments(kind))
        arguments = self.arguments(kind)
        process = self.start(arguments)
        time.sleep(draw.uniform(0.0, 1.0) * self.usual[kind])
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(process, signal.SIGKILL)
        running = int(self.answer()) == signal.SIGKILL
        self.check(f"after killing {kind}")
        self.run(kind, arguments)
        self.check(f"after running {kind} again")
        self.check_end(kind)
        collect(self.settings, grace=0)
        with open_registry(self.settings) as registry:
            known = {Path(row.path).name for row in registry.list()}
        found = {path.name for path in self.settings.mappers.iterdir()} - {".lock"}
        assert found <= known, f"gc left {sorted(found - known)}"
        links = [path for path in (self.settings.home / "blobs").glob("*") if path.stat().st_nlink < 2]
        assert not links, f"gc left {len(links)} blobs"
        return running

    def check_end(self, kind: str) -> None:
        """The command that was run again has left what one that was never disturbed leaves."""
        if kind == "create":  # the registry was lost: what is here comes back
            self.run("register", ["register"])
        if kind == "migrate":
            assert self.states() == self.known, "migrate, run again, lost or changed a row"
            with open_registry(self.settings) as registry:
                told = {digest: [event.what for event in registry.history(digest)] for digest in self.known}
            assert told == {digest: [state] for digest, state in self.known.items()}, told
        left = unregistered(self.settings)
        assert not left, f"{kind}, run again, left {len(left)} mappers without a row"
        with open_registry(self.settings) as registry:
            rows = registry.list()
        retired = [row.digest[:12] for row in rows if row.state is State.RETIRED]
        assert kind != "gc" or not retired, f"gc, run again, left {retired}"
        if kind != "pull":
            return
        made = self.root / "made"
        (row,) = [row for row in rows if row.digest == read_manifest(made).digest]
        assert row.state is State.READY, f"pull, run again, ends as {row.state}: {row.state_reason}"
        assert row.score("top1") is not None and REPO in row.aliases
        assert any(place.repo_id == REPO and not place.pushed for place in row.locations)
        evidence = (Path(row.path) / "evidence.json").read_bytes()
        assert evidence == (made / "evidence.json").read_bytes()
        assert origin.came_by_pull(row.digest, evidence, self.settings)

    def check(self, when: str) -> None:
        """The registry opens and is sound, and what is ready is whole."""
        with open_registry(self.settings) as registry:
            problem = registry.health()
            assert not problem, f"{when}: {problem}"
            rows = registry.list(state=State.READY)
        for row in rows:
            try:
                manifest = verify_artifact(Path(row.path), deep=True)
            except Exception as error:
                raise AssertionError(f"{when}: {row.digest[:12]} is ready but {error}") from None
            assert manifest.digest == row.digest, when
