"""`gc`: what nothing keeps any more.

Kept: every mapper that is draft or ready (drafts go with `drafts=True`), and any that an alias
or a lock file names, or that a living process has loaded. A repository name that push and pull
note (`org/name`) is no such alias: the mapper can be fetched again from there.

A mapper without a row may be all that a lost registry left: it goes on request alone. What is not
called as kvhub calls things is somebody's own and stays.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvhub.artifact.read import read_manifest
from kvhub.catalog import files_of, inside, open_registry, reading_registry
from kvhub.errors import Corrupt, KvhubError, NotFound
from kvhub.files import is_denied, is_full
from kvhub.hub import store
from kvhub.settings import Settings
from kvhub.store import blobs, leftovers, origin, roots, use
from kvhub.store import fits as unfinished
from kvhub.store.links import Links
from kvhub.store.lost import misplaced
from kvhub.store.removal import remove_locked, undo
from kvhub.store.strays import Stray, is_blob, look
from kvhub_registry import Full, MapperRow, State

GRACE = roots.GRACE
"""Seconds for which what no row names may be of a process that has not registered it yet, and for which a
lock file that is missing may be on another branch."""

_GROUP = 256
"""Mappers that go in one transaction at most: each has a lock file open meanwhile."""

Kind = Literal["mapper", "directory", "leftover", "blob", "unregistered", "fit"]


@dataclass(frozen=True)
class Garbage:
    """One thing that may go, and the bytes that are free then."""

    kind: Kind
    path: Path
    size: int
    why: str
    row: MapperRow | None = None


@dataclass(frozen=True)
class Kept:
    """A mapper that would go, and what keeps it."""

    digest: str
    by: str


@dataclass(frozen=True)
class Collected:
    """What went (or would go), and what stayed although no row of a usable mapper names it."""

    garbage: list[Garbage] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    unregistered: list[Stray] = field(default_factory=list)
    """Mappers without a row: `kvhub register` puts them back."""
    foreign: list[Stray] = field(default_factory=list)
    """What kvhub did not put there."""
    absent: list[Path] = field(default_factory=list)
    """Lock files that are missing; what they named is kept for the grace."""
    full: list[str] = field(default_factory=list)
    """Digests of mappers that a full disk keeps: nothing that could go made room enough."""

    @property
    def size(self) -> int:
        """Bytes of all that went."""
        return sum(item.size for item in self.garbage)


def collect(
    settings: Settings | None = None,
    *,
    dry_run: bool = False,
    drafts: bool = False,
    unregistered: bool = False,
    grace: float = GRACE,
    fits: float = unfinished.DAYS,
) -> Collected:
    """Delete what nothing keeps; with `dry_run` only say what that is.

    unregistered: mappers without a row go, too. grace: seconds, see `GRACE`. fits: days after which the
    progress of a fit that has not finished goes, too; one that runs keeps it.
    A crash on the way leaves nothing that the next call does not find.
    Errors: `Corrupt` for a lock file that cannot be read, and for a registry that names nothing although
    mappers are here (nothing is deleted then).
    """
    settings = settings or Settings.load()
    done = Collected()
    if not settings.mappers.is_dir():
        _small(settings, done, grace, dry_run=dry_run)
        _fits(settings, done, fits, dry_run=dry_run)
        return done
    with _alone(settings, dry_run=dry_run):
        with reading_registry(settings) if dry_run else open_registry(settings) as registry:
            rows = registry.list()
        back = undo(rows, settings, shared=is_shared(settings), look=dry_run)
        if not dry_run:
            roots.settle(settings, grace)
        locked = roots.locked(settings, grace)
        done.absent.extend(
            noted.path for noted in roots.notes(settings) if not noted.there and not noted.expired(grace)
        )
        # by digest too: the home may have been moved, or the registry be shared by several machines
        known = {Path(row.path) for row in rows} | {settings.mappers / row.digest for row in rows}
        known |= {store.aside(settings.mappers / digest) for digest in back}
        strays = [look(path) for path in sorted(settings.mappers.iterdir()) if _is_stray(path, known)]
        done.unregistered.extend(stray for stray in strays if stray.kind == "unregistered")
        done.foreign.extend(stray for stray in strays if stray.kind == "foreign")
        done.foreign.extend(_foreign_blobs(settings))
        if done.unregistered and not rows:
            before = misplaced(settings)
            place = f"; an earlier kvhub kept it at {before}" if before else ""
            raise Corrupt(
                f"the registry names no mapper, but {len(done.unregistered)} are in {settings.mappers}",
                f"kvhub register puts them back; if the registry is elsewhere, set KVHUB_DATABASE_URL{place}",
            )
        links = Links(settings)
        for stray in strays:  # first: that needs no room, and may make some
            if stray.kind != "foreign" and (unregistered or stray.kind != "unregistered"):
                _stray(stray, settings, links, done, locked, dry_run=dry_run, grace=grace)
        _blobs(settings, links, done, dry_run=dry_run)  # and this, also of what a killed gc was freeing
        _small(settings, done, grace, dry_run=dry_run)
        _fits(settings, done, fits, dry_run=dry_run)
        may = [row for row in rows if _may_go(row, settings, drafts, grace)]
        _mappers(may, settings, links, done, dry_run=dry_run, drafts=drafts, grace=grace)
        gone = {item.row.digest for item in done.garbage if item.row}
        done.kept.extend(
            Kept(it, "its files are put back, a removal was killed") for it in back if it not in gone
        )
        _blobs(settings, links, done, dry_run=dry_run)
    return done


@contextmanager
def _alone(settings: Settings, *, dry_run: bool) -> Iterator[None]:
    """The store's lock; a look does without it where nothing may be written, and all do where it cannot be
    made for want of room: then nobody else has made it either."""
    with ExitStack() as stack:
        try:
            stack.enter_context(store.exclusive(settings.mappers))
        except OSError as error:
            if not is_full(error) and not (dry_run and is_denied(error)):
                raise
        yield


def _is_stray(path: Path, known: set[Path]) -> bool:
    if path.name.startswith(leftovers.PULL) and path.suffix == ".lock" and path.with_suffix("").exists():
        return False  # goes with what it locks
    return path not in known and path.name != ".lock"


def _may_go(row: MapperRow, settings: Settings, drafts: bool, grace: float) -> bool:
    if not inside(files_of(row, settings), settings.mappers):
        return False  # its files are somebody's own
    if is_shared(settings) and not (settings.mappers / row.digest).is_dir():
        return False  # of another machine, whose locks and processes are not seen from here
    return _is_done(row, drafts, grace)


def _is_done(row: MapperRow, drafts: bool, grace: float) -> bool:
    """Whether nobody uses it any more, as far as its state says."""
    if row.state is State.RETIRED:
        return True
    return drafts and row.state is State.DRAFT and time.time() - row.changed.timestamp() > grace


def is_shared(settings: Settings) -> bool:
    """Whether other homes may have their mappers in this registry, too."""
    return settings.database_file != settings.home / "registry.db"


def _mappers(
    rows: list[MapperRow],
    settings: Settings,
    links: Links,
    done: Collected,
    *,
    dry_run: bool,
    drafts: bool,
    grace: float,
) -> None:
    """One after the other. What a full disk keeps is tried again once others have made room, and then with
    others: what has shards in common makes room only together."""

    def go(some: Sequence[MapperRow]) -> bool:
        return _together(some, settings, links, done, dry_run=dry_run, drafts=drafts, grace=grace)

    left = rows
    while left:
        rest = [row for row in left if not go([row])]
        if len(rest) == len(left):
            alike = sorted(rest, key=lambda row: -row.size)  # what has shards in common is of one size
            groups = [alike[at : at + _GROUP] for at in range(0, len(alike), _GROUP)]
            rest = [row for group in groups if len(group) < 2 or not go(group) for row in group]
            if len(rest) == len(left):
                break
        if rest:
            _blobs(settings, links, done, dry_run=dry_run)
        left = rest
    done.full.extend(row.digest for row in left)


def _together(
    rows: Sequence[MapperRow],
    settings: Settings,
    links: Links,
    done: Collected,
    *,
    dry_run: bool,
    drafts: bool,
    grace: float,
) -> bool:
    """Delete mappers in one transaction; False where the disk is full and they would not make room for it."""
    shared = is_shared(settings)

    def reason_to_stay(now: MapperRow) -> str:
        """Asked again at the last moment: promote, alias and lock do not wait for us."""
        if not _is_done(now, drafts, grace):
            return f"it is {now.state.value} meanwhile"
        return _keeper(now.digest, now.aliases, roots.locked(settings, grace))

    with ExitStack() as stack:
        kept: dict[str, str] = {}
        for row in rows:
            free = stack.enter_context(use.unused(row.digest, settings, look=dry_run))
            by = reason_to_stay(row) or ("" if free else "a process has it loaded")
            if by:
                kept[row.digest] = by
        going = [row for row in rows if row.digest not in kept]
        sizes = {row.digest: links.freed(store.wherever(files_of(row, settings))) for row in going}
        if going and not dry_run:
            try:
                stay = remove_locked(going, settings, unless=reason_to_stay, keep_row=shared)
            except KvhubError as error:
                gone = isinstance(error, NotFound)
                if not gone and not isinstance(error.__cause__, Full):
                    raise
                for row in going:
                    links.stays(files_of(row, settings))
                if not gone or len(going) > 1:
                    return False
                stay = {going[0].digest: "its row has just been removed"}
                going = []
            for row in going:
                if row.digest in stay:
                    links.stays(files_of(row, settings))
                else:
                    origin.forget(row.digest, settings)
            kept |= stay
    done.kept.extend(Kept(digest, by) for digest, by in kept.items())
    row_stays = "; its row stays, for other machines" if shared else ""
    for row in rows:
        if row.digest not in kept:
            why = f"{row.state.value}: {row.state_reason}{row_stays}"
            done.garbage.append(Garbage("mapper", files_of(row, settings), sizes[row.digest], why, row))
    return True


def _keeper(digest: str, aliases: tuple[str, ...], locked: dict[str, Path]) -> str:
    names = [name for name in aliases if "/" not in name]
    if names:
        return "alias " + ", ".join(f"@{name}" for name in names)
    return f"locked by {locked[digest]}" if digest in locked else ""


def _stray(
    stray: Stray,
    settings: Settings,
    links: Links,
    done: Collected,
    locked: dict[str, Path],
    *,
    dry_run: bool,
    grace: float,
) -> None:
    """A directory without a row, or what a killed process left."""
    path = stray.path
    if stray.kind == "leftover":
        with suppress(FileNotFoundError), leftovers.abandoned(path, grace) as left:
            if left:
                done.garbage.append(Garbage("leftover", path, links.freed(path), stray.why))
                if not dry_run:
                    _delete(path)
                    if path.name.startswith(leftovers.PULL):
                        path.with_suffix(".lock").unlink(missing_ok=True)
        return
    with suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime < grace:
            return  # a fit may be about to register it
        with use.unused(path.name, settings, look=dry_run) as free:
            by = _keeper(path.name, (), locked) or ("" if free else "a process has it loaded")
            if by:
                done.kept.append(Kept(path.name, by))
                return
            kind: Kind = "unregistered" if stray.kind == "unregistered" else "directory"
            done.garbage.append(Garbage(kind, path, links.freed(path), stray.why))
            if stray in done.unregistered:
                done.unregistered.remove(stray)
            if not dry_run:
                _delete(path)
                origin.forget(path.name, settings)


def _small(settings: Settings, done: Collected, grace: float, *, dry_run: bool) -> None:
    """Small files beside the store that were never finished."""
    for path in leftovers.small(settings):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if time.time() - found.st_mtime >= grace:
                done.garbage.append(Garbage("leftover", path, found.st_size, "of a process that was killed"))
                if not dry_run:
                    _delete(path)


def _blobs(settings: Settings, links: Links, done: Collected, *, dry_run: bool) -> None:
    """Shards that no mapper has; those of a mapper that has just gone go with it, unmentioned."""
    gone = {item.path for item in done.garbage}
    unreferenced = [path for path in blobs.unreferenced(settings) if is_blob(path) and path not in gone]
    missing = set(_missing(settings, gone)) if unreferenced else set()
    for path in unreferenced:
        if path.name in missing:
            continue
        size, counted = path.stat().st_size, links.counted(path)
        if not dry_run:
            path.unlink(missing_ok=True)
        if not counted:
            done.garbage.append(Garbage("blob", path, size, "no mapper has this shard"))


def _fits(settings: Settings, done: Collected, days: float, *, dry_run: bool) -> None:
    """Progress of fits that nobody has gone on with."""
    for fit in unfinished.unfinished(settings):
        if fit.running or (fit.days < days and not fit.aside):
            continue
        if not dry_run:
            try:
                if not unfinished.remove(fit):
                    continue
            except OSError as error:
                raise _undeletable(fit.path, error) from None
        why = "half deleted" if fit.aside else f"a fit that has not finished, {fit.days:.0f} days old"
        done.garbage.append(Garbage("fit", fit.path, fit.size, why))


def _foreign_blobs(settings: Settings) -> Iterator[Stray]:
    folder = settings.home / "blobs"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not is_blob(path):
            yield Stray("foreign", path, "kvhub did not put it there")


def _missing(settings: Settings, gone: set[Path]) -> Iterator[str]:
    """Shards that a mapper in the store lists and has lost: the blob may be the only copy."""
    for directory in settings.mappers.iterdir():
        if directory.name.startswith(".") or directory in gone:
            continue
        with suppress(KvhubError):
            for entry in read_manifest(directory).files:
                if not (directory / entry.name).exists():
                    yield entry.sha256


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise _undeletable(path, error) from None


def _undeletable(path: Path, error: OSError) -> KvhubError:
    return KvhubError(f"cannot delete {path}: {error.strerror}", "delete it by hand")
