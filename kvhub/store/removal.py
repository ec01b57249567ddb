"""A mapper goes: its row and its files together, whatever interrupts it and however full the disk is."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvhub.artifact.read import verify_artifact
from kvhub.catalog import explained, files_of, inside, open_registry
from kvhub.errors import AccessDenied, KvhubError
from kvhub.hub import store
from kvhub.settings import Settings
from kvhub.store import blobs
from kvhub_registry import Full, MapperRow, RegistryError, State
from kvhub_registry.files import free_bytes, has_room

GONE = "its files are gone: they were deleted, and its row could not be forgotten"


def remove(row: MapperRow, settings: Settings | None = None) -> bool:
    """Forget a mapper and delete its files; False where they lie outside the store and stay."""
    return not remove_all([row], settings)


def remove_all(rows: Sequence[MapperRow], settings: Settings | None = None) -> set[str]:
    """Forget mappers and delete their files, those in the store in one transaction.

    Returns the digests of those whose files lie outside the store and stay.
    """
    settings = settings or Settings.load()
    here = [row for row in rows if inside(files_of(row, settings), settings.mappers)]
    if here:
        settings.mappers.mkdir(parents=True, exist_ok=True)
        with store.exclusive(settings.mappers):  # or a pull could register one again in between
            remove_locked(here, settings, shards=True)
    others = [row for row in rows if row not in here]
    for row in others:
        with explained(), open_registry(settings) as registry:
            registry.remove(row.digest)
    return {row.digest for row in others if files_of(row, settings).exists()}


def remove_locked(
    rows: Sequence[MapperRow],
    settings: Settings,
    *,
    unless: Callable[[MapperRow], str] | None = None,
    keep_row: bool = False,
    shards: bool = False,
) -> dict[str, str]:
    """Forget mappers in the store and delete their files, by a caller that holds the store's lock.

    unless: asked of each row as it is at the last moment; one for which it gives a reason stays, and the
    reasons by digest are returned. keep_row: the files alone go. shards: those that no other mapper has go
    at once. The files are put aside in the transaction that forgets the rows: a crash on the way leaves
    leftovers for `kvhub gc`, never files that could pass for a mapper that somebody still wants.
    On a full disk, where forgetting has no room, they are deleted in it, once all is written but the commit
    and it is known that this makes room enough for that: a crash then leaves rows without files, and the
    same command again forgets them. Else all stays (`Full`, as one error of `kvhub.errors`).
    """
    database = settings.database_file
    tight = database is not None and not has_room(database.parent)
    going = _Going(rows, settings, unless, keep_row=keep_row)
    with explained():
        if tight and database is not None:
            going.make_room(free_bytes(database.parent))
            return going.kept
        try:
            moved = going.put_aside()
        except Full:  # a quota, or other writers; where files may only have a size, no room helps
            if database is None or resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
                raise
            going.make_room(0)
            return going.kept
    for aside in moved:
        with _deleting(aside):
            if shards:
                blobs.delete(aside, settings)
            else:
                shutil.rmtree(aside)
    return going.kept


def undo(rows: Sequence[MapperRow], settings: Settings, *, shared: bool, look: bool = False) -> list[str]:
    """Undo what was killed between putting files aside and forgetting the row, by the lock's holder.

    Returns the digests of those whose files are back; look: would be, and nothing is done.
    Where the files are not whole any more (a full disk) the row becomes a draft that says so. Rows whose
    files are elsewhere are left alone; shared: other machines may have them, so that nothing here says that
    they are gone.
    """
    back: list[str] = []
    for row in rows:
        directory = settings.mappers / row.digest
        aside = store.aside(directory)
        if not aside.is_dir() or directory.exists() or files_of(row, settings).exists():
            continue
        try:
            whole = verify_artifact(aside, deep=False).digest == row.digest
        except KvhubError:
            whole = False
        if whole:
            back.append(row.digest)
            if not look:
                aside.rename(directory)
        elif not shared and not look:
            with explained(), open_registry(settings) as registry:
                registry.set_state(row.digest, State.DRAFT, GONE, keep_retired=True)
    return back


class _Going:
    """Mappers that go in one transaction."""

    def __init__(
        self,
        rows: Sequence[MapperRow],
        settings: Settings,
        unless: Callable[[MapperRow], str] | None,
        *,
        keep_row: bool,
    ) -> None:
        self.kept: dict[str, str] = {}
        self._settings, self._unless, self._keep_row = settings, unless, keep_row
        self._places = {row.digest: files_of(row, settings) for row in rows}
        for directory in self._places.values():
            with suppress(OSError):  # of a removal that was killed; its shards go, too
                blobs.delete(store.aside(directory), settings)

    def put_aside(self) -> list[Path]:
        """Forget the rows, with the files put aside; back where that fails. Returns where they are."""
        moved: list[Path] = []

        def last(_: int) -> None:
            for aside in self._aside():
                moved.append(aside)

        try:
            self._settle(last)
        except BaseException:
            for aside in moved:
                directory = aside.with_name(aside.name.removeprefix(".removed-"))
                if not directory.exists():
                    aside.rename(directory)
            raise
        return moved

    def make_room(self, room: int) -> None:
        """Forget the rows in the room that their files give. room: bytes that are free without."""
        there = [digest for digest, place in self._places.items() if place.exists()]

        def last(need: int) -> None:
            if need > room + blobs.frees(self._here(), self._settings):
                raise Full(
                    "the disk is full, and these files would not make room enough to forget their row",
                    "make room; those that share shards make it together: kvhub rm MAPPER MAPPER; kvhub gc",
                )
            for aside in self._aside():
                with _deleting(aside):
                    blobs.delete(aside, self._settings)

        try:
            self._settle(last, measure=True)
        except (RegistryError, KvhubError):  # somebody else took the room, or not all could be deleted
            for digest in there:
                if not self._places[digest].exists():
                    with suppress(RegistryError, KvhubError), open_registry(self._settings) as registry:
                        registry.set_state(digest, State.DRAFT, GONE, keep_retired=True)
            raise

    def _settle(self, last: Callable[[int], None], *, measure: bool = False) -> None:
        with open_registry(self._settings) as registry:
            registry.settle(self._places, self._goes, last, measure=measure)

    def _goes(self, now: MapperRow) -> bool:
        reason = self._unless(now) if self._unless else ""
        if reason:
            self.kept[now.digest] = reason
        return not reason and not self._keep_row

    def _here(self) -> list[Path]:
        going = [place for digest, place in self._places.items() if digest not in self.kept]
        return [place for place in going if place.is_dir() and not place.is_symlink()]

    def _aside(self) -> Iterator[Path]:
        for directory in self._here():
            with _deleting(directory):
                aside = directory.rename(store.aside(directory))  # at once gone for everybody else
            yield aside


@contextmanager
def _deleting(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AccessDenied(
            f"{directory} cannot be deleted: {error.strerror}", "check who owns it; kvhub gc deletes the rest"
        ) from None
