"""Notices, while serving, that a mapper was taken out of service; keeps the measured costs on disk.

A thread of its own asks the settings file, the artifact and the registry every few
seconds. It only takes note: the scheduler's thread withdraws at its next request.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvhub.errors import KvhubError
from kvhub_sglang.report import logger
from kvhub_sglang.serving import Serving
from kvhub_sglang.settings import ENVIRONMENT, load_settings

SAVE_EVERY = 15
"""Rounds of watching between two writes of the cost file."""


class Watch:
    """What was withdrawn and not yet acted on: (digest, cause), appended by one thread, taken by another."""

    def __init__(self, serving: Serving) -> None:
        self.found: deque[tuple[str, str]] = deque()
        self._serving = serving
        self._settings_file = os.environ.get(ENVIRONMENT)
        self._stamp = self._stat()
        self._registered = self._states() if serving.settings.watch_registry else None
        self._stopped = threading.Event()
        self._told: set[str] = set()

    def start(self) -> None:
        """Begin, unless the settings say never."""
        if self._serving.settings.watch_seconds > 0:
            threading.Thread(target=self._run, name="kvhub-watch", daemon=True).start()

    def stop(self) -> None:
        """kvhub was switched off."""
        self._stopped.set()

    def _run(self) -> None:
        rounds = 0
        while not self._stopped.wait(self._serving.settings.watch_seconds):
            rounds += 1
            self.look()
            if rounds % SAVE_EVERY == 0:
                self._try(self.save)

    def look(self) -> None:
        """One round."""
        for question in (self._by_settings, self._by_artifact, self._by_registry):
            self._try(question)

    def save(self) -> None:
        """Keep what was measured."""
        if self._serving.settings.cost_file:
            self._serving.cost.save(Path(self._serving.settings.cost_file))

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, KvhubError) as error:  # not knowing is no reason to withdraw
            logger.warning("kvhub cannot watch for withdrawn mappers: %s", error)
        except Exception:
            logger.exception("kvhub cannot watch for withdrawn mappers")

    def _note(self, digest: str, cause: str) -> None:
        if digest not in self._told:
            self._told.add(digest)
            self.found.append((digest, cause))

    def _by_settings(self) -> None:
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        served = {m.digest: m.state for m in load_settings().mappers}
        for candidate in self._serving.candidates:
            if candidate.digest not in served:
                self._note(candidate.digest, "removed")
            elif served[candidate.digest] == "retired":
                self._note(candidate.digest, "retired")

    def _by_artifact(self) -> None:
        paths = {m.digest: Path(m.path) for m in self._serving.settings.mappers}
        for candidate in self._serving.candidates:
            path = paths.get(candidate.digest)
            if path is not None and path.parent.is_dir() and not (path / "manifest.json").is_file():
                self._note(candidate.digest, "removed")

    def _by_registry(self) -> None:
        if self._registered is None:
            return
        states = self._states()
        for candidate in self._serving.candidates:
            if states.get(candidate.digest) == "retired":
                self._note(candidate.digest, "retired")
            elif candidate.digest in self._registered and candidate.digest not in states:
                self._note(candidate.digest, "removed")

    def _states(self) -> dict[str, str]:
        from kvhub.catalog import open_registry

        with open_registry(read_only=True) as registry:
            return {row.digest: str(row.state) for row in registry.list()}

    def _stat(self) -> tuple[int, int] | None:
        if not self._settings_file or not Path(self._settings_file).exists():
            return None
        found = Path(self._settings_file).stat()
        return (found.st_mtime_ns, found.st_ino)
