"""Small files and the places for them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvhub.errors import AccessDenied, BadInput, KvhubError
from kvhub.files import check_output, write_bytes, write_output, writing


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["link", "dangling", "directory", "pipe", "file/x", "file/x/y", "n" * 256, "n" * 256 + "/x", ""]
)
def test_what_is_no_place_for_a_file_is_left_as_it_is(crowded: Path, name: str) -> None:
    before = {path.name: path.lstat() for path in crowded.iterdir()}
    for refused in (lambda path: check_output(path), lambda path: write_output(path, b"new")):
        with pytest.raises(BadInput):
            refused(crowded / name)
    assert {path.name: path.lstat() for path in crowded.iterdir()} == before
    assert (crowded / "file").read_text() == "kept"


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(BadInput, match="not a regular file"):
        write_output(Path("/dev/null"), b"")


@pytest.mark.parametrize("name", ["file", "new/deep/file", "n" * 255])
def test_a_file_is_written_with_what_is_above_it(crowded: Path, name: str) -> None:
    check_output(crowded / name)
    write_output(crowded / name, b"new")
    assert (crowded / name).read_bytes() == b"new"
    assert not list(crowded.rglob(".*"))


@pytest.mark.parametrize("name", ["n" * 256, "file/x", "directory", "nowhere/x"])
def test_what_fails_is_told_once_and_leaves_nothing(crowded: Path, name: str) -> None:
    with pytest.raises(KvhubError, match="cannot write"):
        write_bytes(crowded / name, b"new")
    assert not list(crowded.rglob(".*"))


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, KvhubError, "cannot write f: the disk is full"),
        (errno.EDQUOT, KvhubError, "cannot write f: the disk is full"),
        (errno.EACCES, AccessDenied, "f may not be written"),
        (errno.EROFS, AccessDenied, "f may not be written"),
        (errno.ENAMETOOLONG, KvhubError, "cannot write f: File name too long"),
    ],
)
def test_what_a_failed_write_means(number: int, kind: type[KvhubError], says: str) -> None:
    with pytest.raises(KvhubError) as caught, writing(Path("f")):
        raise OSError(number, os.strerror(number))
    assert (type(caught.value), caught.value.message) == (kind, says)


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    wrong: list[Exception] = []

    def write(byte: bytes) -> None:
        try:
            for _ in range(30):
                write_bytes(tmp_path / "file", byte * 4096)
        except KvhubError as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(byte,)) for byte in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (tmp_path / "file").read_bytes() in (b"a" * 4096, b"b" * 4096)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
