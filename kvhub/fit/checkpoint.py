"""Progress of a fit on disk: after a crash or kill -9 the same command goes on and gives the same mapper.

    state.json                which fit this is, when it began, windows in the moments; a sha256 of that
    moments-<windows>.safetensors   sums, products, and the rows of a block that is not full yet
    lock                      held while a fit runs

Moments are kept to the last bit, so that what a resumed fit adds to them gives what an uninterrupted
one would have: the same weights, and with the first start's `created` the same digest.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from kvhub.errors import BadInput, KvhubError, NotFound
from kvhub.files import unwritable
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.progress import LOCK, STATE, is_progress
from kvhub.fit.store import TensorFile, sha256_of, write_bytes, write_tensors
from kvhub.model.identity import canonical_json
from kvhub.strict_json import parse_object, read_bounded

FORMAT = 1
_LIMIT = 1 << 20
_SECONDS = 60.0
_SHARE = 20.0
"""Without `every`: at most once a minute, and at most a twentieth of the time is spent writing."""
_SUMS = ("x", "y", "xx", "xy", "yy")


def fit_key(fit: Mapping[str, Any]) -> str:
    """Directory name of a fit's default checkpoint: a digest of all that determines the result."""
    return hashlib.sha256(canonical_json(dict(fit))).hexdigest()[:32]


class Checkpoint:
    """One fit's progress in one directory, under a lock."""

    def __init__(self, directory: Path, fit: Mapping[str, Any], *, every: int | None = None) -> None:
        """fit: all that determines the result, JSON values by name. every: windows between writes."""
        self.directory = directory
        self._fit = json.loads(canonical_json(dict(fit)))
        self._every = every
        self._state: dict[str, Any] = {}
        self._written, self._took = time.monotonic(), 0.0
        self.damaged = ""
        """Why a checkpoint that was there is not used, for people."""

    @contextmanager
    def held(self) -> Iterator[Checkpoint]:
        """Lock the directory and read what is in it.

        Errors: `BadInput` where it is another fit's checkpoint, or no checkpoint at all; `KvhubError`
        where another process works on it; `AccessDenied`. What is damaged is put aside (`damaged`).
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.directory / LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            raise KvhubError(
                f"another fit is at work on {self.directory}", "wait for it, or give another --checkpoint"
            ) from None
        except OSError as error:
            raise unwritable(self.directory, error, "give another --checkpoint") from None
        try:
            self._open()
            try:
                yield self
            except BaseException:
                if {path.name for path in self.directory.iterdir()} <= {LOCK, STATE}:
                    self.remove()  # there is nothing to go on from
                raise
        finally:
            lock.release()

    def join(self) -> None:
        """Read what the process that holds the lock has found. Errors: `KvhubError`."""
        found = self._read()
        if found is None or found["fit"] != self._fit:
            raise KvhubError(
                f"{self.directory} is not on a file system that all processes share",
                "give a --checkpoint that is",
            )
        self._state = found

    def _open(self) -> None:
        found = self._read()
        if found is None:
            here = list(self.directory.iterdir())
            strange = [p.name for p in here if not is_progress(p.name) or (p.name == STATE and p.is_dir())]
            if strange:
                raise BadInput(
                    f"{self.directory} is not a checkpoint: it holds {sorted(strange)[0][:60]!r}",
                    "give an empty or a new directory",
                )
            self._state = {
                "schema_version": FORMAT,
                "fit": self._fit,
                "created": datetime.now(UTC).isoformat(timespec="microseconds"),
                "windows": 0,
                "file": None,
            }
            self._write()
        else:
            self._state = found
            self._demand_same()
            self._demand_whole()
        self._sweep()

    def _read(self) -> dict[str, Any] | None:
        try:
            state = parse_object(read_bounded(self.directory / STATE, limit=_LIMIT), STATE)
            if state.get("sha256") != _sum(state):  # one digit of `windows` is another mapper
                raise KvhubError(f"{STATE} is damaged")
            del state["sha256"]
            self._demand_shape(state)
        except NotFound:
            return None
        except KvhubError as error:
            self.damaged = error.message
            return None
        return state

    def _write(self) -> None:
        write_bytes(self.directory / STATE, sealed(self._state))

    @staticmethod
    def _demand_shape(state: Mapping[str, Any]) -> None:
        file = state.get("file")
        whole = (
            state.get("schema_version") == FORMAT
            and isinstance(state.get("fit"), dict)
            and isinstance(state.get("created"), str)
            and type(state.get("windows")) is int
            and (file is None or (isinstance(file, dict) and is_progress(str(file.get("name")))))
        )
        if not whole:
            raise KvhubError(f"{STATE} is damaged")
        try:
            datetime.fromisoformat(state["created"])
        except ValueError:
            raise KvhubError(f"{STATE} is damaged") from None

    def _demand_same(self) -> None:
        theirs = self._state["fit"]
        for name in sorted({*theirs, *self._fit}):
            if theirs.get(name) != self._fit.get(name):
                raise BadInput(
                    f"the checkpoint in {self.directory} is of another fit: its {name} is"
                    f" {_short(theirs.get(name))}, not {_short(self._fit.get(name))}",
                    "give another --checkpoint, or remove that directory",
                )

    def _demand_whole(self) -> None:
        file = self._state["file"]
        if file is None:
            return
        path = self.directory / file["name"]
        if not path.is_file() or sha256_of(path) != file.get("sha256"):
            self.damaged = f"{path.name} is missing or damaged"
            self._state |= {"windows": 0, "file": None}
            self._write()

    def _sweep(self) -> None:
        keep = self._state["file"]["name"] if self._state["file"] else ""
        for path in self.directory.iterdir():
            if path.name.startswith((".writing-", "moments-")) and path.name != keep:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    @property
    def tag(self) -> str:
        """The fit's key: the same for the same fit, whatever the directory."""
        return fit_key(self._fit)

    @property
    def created(self) -> str:
        """ISO 8601 time of the first start."""
        return str(self._state["created"])

    @property
    def layers(self) -> int | None:
        """Target layers at a time that the first start decided for; None: all."""
        found = self._state.get("layers")
        return found if type(found) is int and found > 0 else None

    def keep_layers(self, layers: int) -> None:
        """Remember the decision."""
        if self.layers != layers:
            self._state["layers"] = layers
            self._write()

    @property
    def windows(self) -> int:
        """Windows whose rows are in the stored moments."""
        return int(self._state["windows"])

    def restore(self, moments: PairMoments) -> int:
        """Put what is stored into `moments` (empty ones); the number of windows that are in them.

        A process that shares the work reads the bands that it owns. Errors: `KvhubError`.
        """
        if self._state["file"] is None:
            return 0
        path = self.directory / self._state["file"]["name"]
        try:
            with TensorFile(path) as file:
                for kind, one in (("key", moments.key), ("value", moments.value)):
                    _restore(one, kind, file)
                for number in range(int(file.metadata["waiting"])):
                    rows = [file.tensor(f"waiting.{number}.{part}") for part in range(4)]
                    moments.waiting.append(((rows[0], rows[1]), (rows[2], rows[3])))
        except (KvhubError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise KvhubError(f"{path} cannot be read: {type(error).__name__}", "remove it") from None
        return self.windows

    def due(self, windows: int) -> bool:
        """Whether it is time to save."""
        if self._every is not None:
            return windows - self.windows >= self._every
        return time.monotonic() - self._written > max(_SECONDS, _SHARE * self._took)

    def save(self, moments: PairMoments, windows: int) -> None:
        """Keep `moments`, whole (in one process), as of `windows` windows."""
        began = time.monotonic()
        tensors: dict[str, Tensor] = {}
        for kind, one in (("key", moments.key), ("value", moments.value)):
            tensors |= {f"{kind}.{name}": getattr(one, name) for name in _SUMS}
        for number, (source, target) in enumerate(moments.waiting):
            tensors |= {f"waiting.{number}.{part}": rows for part, rows in enumerate((*source, *target))}
        name = f"moments-{windows:09d}.safetensors"
        about = {"n": str(moments.key.n), "waiting": str(len(moments.waiting))}
        digest = write_tensors(self.directory / name, tensors, about)
        self._state |= {"windows": windows, "file": {"name": name, "sha256": digest}}
        self._write()
        self._sweep()
        self._written = time.monotonic()
        self._took = self._written - began

    def training(self, direction: int) -> Path:
        """Where the gradient steps of the first or second direction keep their progress."""
        return self.directory / f"training-{direction}.safetensors"

    def remove(self) -> None:
        """Forget the progress: the mappers are written. What is not ours stays."""
        with suppress(OSError):
            for path in self.directory.iterdir():
                if path.name == "captures":
                    shutil.rmtree(path)
                elif is_progress(path.name):
                    path.unlink()
            self.directory.rmdir()


def _restore(moments: Moments, kind: str, file: TensorFile) -> None:
    moments.n = int(file.metadata["n"])
    for name in ("x", "y"):
        getattr(moments, name).copy_(file.tensor(f"{kind}.{name}"))
    if moments.yy.dim() == 1:
        moments.yy.copy_(file.tensor(f"{kind}.yy"))
    for band in moments.bands():
        if moments.mine is None or band in moments.mine:
            left = 0 if band.matrix == "xy" else band.start
            place = band.of(moments)
            for at, rows in file.rows(f"{kind}.{band.matrix}", band.start, band.stop):
                place[at - band.start :][: len(rows)].copy_(rows[:, left:])


def sealed(state: Mapping[str, Any]) -> bytes:
    """A state as it is kept, with its sha256."""
    return canonical_json({**state, "sha256": _sum(state)}) + b"\n"


def _sum(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json({**state, "sha256": ""})).hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 40 else f"{text[:37]}..."
