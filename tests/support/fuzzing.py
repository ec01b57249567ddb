"""Run a case of the corpus: a typed refusal, or the very mapper; anything else is a fault of ours."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from loopback_hub import LoopbackHub
from loopback_hub.store import Repo
from starlette.requests import Request
from starlette.responses import Response
from support import corpus
from support.published import publishable

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.open import open_tensors
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import explained, open_registry
from kvhub.cli.listed import of_row, record
from kvhub.errors import Corrupt, Incompatible, KvhubError
from kvhub.hub import client
from kvhub.hub.pull import fetch
from kvhub.hub.push import push
from kvhub.hub.reference import parse
from kvhub.hub.search import search
from kvhub.model.identity import canonical_json
from kvhub.settings import Settings
from kvhub.store.recover import put_back
from kvhub_registry import MapperRow

KINDS = ("manifest", "weights", "hub", "numbers")
REPO = "tester/mapper"
NUMBERS = "tester/numbers"


class Fuzz:
    """One artifact, one Hub, one home; cases leave all three as they were."""

    def __init__(self, root: Path, hub: LoopbackHub) -> None:
        self.root, self.hub = root, hub
        self.artifact = root / "artifact"
        self.manifest: Manifest = publishable(self.artifact)
        self.settings = Settings(root / "home", f"sqlite:///{root}/home/registry.db", False)
        self.hub_ready = False
        self.hub_cases = self.delivered = 0
        """Cases of a hostile Hub, and those that met its fault."""

    def case(self, number: int) -> str:
        """Run one; returns what became of it: `refused: WHAT`, `the same`, .... Raises `AssertionError`."""
        kind = KINDS[number % len(KINDS)]
        try:
            return getattr(self, f"_{kind}")(number)
        except KvhubError as error:
            assert error.message.isprintable(), (number, error.message)
            assert len(error.message) < 1000, number
            return f"refused: {type(error).__name__}"

    def _manifest(self, number: int) -> str:
        path = self.artifact / "manifest.json"
        good = path.read_bytes()
        bad = corpus.manifest(good, number)
        path.write_bytes(bad)
        try:
            found = verify_artifact(self.artifact, deep=True)
            open_tensors(self.artifact, found)
            # Another mapper than ours may be a sound one; then its identity is these bytes.
            assert found.digest == hashlib.sha256(bad).hexdigest(), number
        finally:
            path.write_bytes(good)
        return "the same" if bad == good else "another mapper"

    def _weights(self, number: int) -> str:
        path = self.artifact / "model.safetensors"
        good = path.read_bytes()
        bad = corpus.weights(good, number)
        path.write_bytes(bad)
        try:
            # As a mapper would be opened whose manifest lists these very bytes: the header must hold alone.
            open_tensors(self.artifact, self.manifest)
            try:
                verify_artifact(self.artifact, deep=True)
            except KvhubError as error:
                return f"refused: {type(error).__name__}"
            assert bad == good, number
        finally:
            path.write_bytes(good)
        return "the same"

    def _numbers(self, number: int) -> str:
        """Manifest or evidence, canonical, with a number that cannot be: to pull, and to register."""
        self._publish()
        draw, files = random.Random(f"numbers {number}"), {}
        for name in ("manifest.json", "evidence.json"):
            files[name] = (self.artifact / name).read_bytes()
        found = {name: json.loads(data) for name, data in files.items()}
        name = draw.choice(sorted(found))
        found[name] = corpus.numbers(found[name], draw)
        bad = {"manifest.json": canonical_json(found["manifest.json"]) + b"\n"}
        digest = hashlib.sha256(bad["manifest.json"]).hexdigest()
        bad["evidence.json"] = canonical_json(found["evidence.json"] | {"mapper": digest}) + b"\n"
        tree = self.hub.store.repos[REPO].head.tree
        self.hub.store.repos[NUMBERS] = repo = Repo(NUMBERS)
        repo.add(tree | {path: self.hub.store.put(data) for path, data in bad.items()}, "hostile")
        try:
            for path, data in bad.items():
                (self.artifact / path).write_bytes(data)
            rows = [
                self._kept(digest, lambda: put_back(self.artifact, self.settings)),
                self._kept(digest, lambda: fetch(NUMBERS, None, self.settings)),
            ]
        finally:
            for path, data in files.items():
                (self.artifact / path).write_bytes(data)
        assert rows[0] == rows[1], (number, rows)
        return rows[1]

    def _kept(self, digest: str, take: Callable[[], MapperRow]) -> str:
        """What becomes of a mapper: refused with nothing left, or one that programs can read of."""
        before = digest == self.manifest.digest
        try:
            row = take()
        except KvhubError as error:
            assert error.message.isprintable() and len(error.message) < 1000, error.message
            assert type(error) in (Corrupt, Incompatible), error
            if not before:
                assert not (self.settings.mappers / digest).exists()
                with explained(), open_registry(self.settings) as registry:
                    assert digest not in {row.digest for row in registry.list()}
            return f"refused: {type(error).__name__}"
        json.dumps([record(of_row(row)), *(score.model_dump() for score in row.scores)], allow_nan=False)
        with explained(), open_registry(self.settings) as registry:
            registry.remove(row.digest)
        shutil.rmtree(self.settings.mappers / digest, ignore_errors=True)
        return "another mapper"

    def _publish(self) -> None:
        if not self.hub_ready:
            push(self.artifact, REPO, settings=self.settings)
            self.hub_ready = True

    def _hub(self, number: int) -> str:
        self._publish()
        for left in (self.settings.mappers, self.settings.home / "blobs"):  # else nothing is fetched
            shutil.rmtree(left, ignore_errors=True)
        tree = self.hub.store.repos[REPO].head.tree
        listing = number % 5 == 0
        sizes = {name: entry.size for name, entry in tree.items()}
        fault, met = corpus.answer(number, sizes, listing=listing), threading.Event()

        def noted(request: Request) -> Response | None:
            response = fault(request)
            if response is not None:
                met.set()
            return response

        self.hub.faults[:] = [noted]
        self.hub_cases += 1
        try:
            if listing:
                for hit in search(target="large-7b"):
                    assert parse(hit.repo_id).repo_id == REPO, number
                return "listed"
            by_digest = number % 7 == 0
            row = fetch(f"{REPO}/{self.manifest.digest[:8]}" if by_digest else REPO, None, self.settings)
            assert row.digest == self.manifest.digest, number
        finally:
            self.hub.faults.clear()
            self.delivered += met.is_set()
        return "the same"


@contextmanager
def impatient() -> Iterator[list[float]]:
    """No waiting between attempts; gives the seconds that somebody wanted to sleep."""
    import time

    real, given = time.sleep, client.ask.__kwdefaults__["sleep"]
    wanted: list[float] = []

    def short(seconds: float) -> None:
        wanted.append(seconds)
        real(min(seconds, 0.001))

    time.sleep = short
    client.ask.__kwdefaults__["sleep"] = lambda seconds: None
    try:
        yield wanted
    finally:
        time.sleep, client.ask.__kwdefaults__["sleep"] = real, given
