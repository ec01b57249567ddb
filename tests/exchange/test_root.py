"""Which directories an exchange takes, and which it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhub.errors import AccessDenied, BadInput
from kvhub.exchange.root import MARKER, check_root, is_marked, open_root

NAME = "ab" + "0" * 62 + ".kv"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "exchange"
    path.mkdir(mode=0o700)
    return path


def make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")


@pytest.mark.parametrize(
    "name",
    [
        "thesis.odt",
        ".bashrc",
        "Documents/thesis.odt",
        ".ssh/id",
        "ab/thesis.odt",
        "ab/notes.kv",
        "ab/.editor.part",
        f"cd/{NAME}",
        f"AB/{NAME}",
        f"abc/{NAME}",
        NAME,
        f"ab/{NAME}/inside",
        f"{MARKER}/inside",
    ],
)
def test_a_directory_with_something_else_in_it_is_refused(root: Path, name: str) -> None:
    make(root / "ab" / NAME.replace("ab0", "ab1"))
    make(root / name)
    before = sorted(root.rglob("*"))
    with pytest.raises(BadInput, match="holds something else") as refused:
        open_root(root)
    assert refused.value.hint and "\n" not in refused.value.message
    assert sorted(root.rglob("*")) == before and (root / name).read_text() == "mine"


@pytest.mark.parametrize("name", [None, f"ab/{NAME}", "ab/.abcd_e12.part"])
def test_an_empty_one_and_one_of_blocks_alone_are_taken(root: Path, name: str | None) -> None:
    if name:
        make(root / name)
    check_root(root)
    assert not is_marked(root)
    open_root(root)
    assert is_marked(root)
    make(root / "added later")  # a marked one is an exchange, whatever is put there
    open_root(root)


def test_a_new_one_is_made_private_and_marked(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    check_root(root)
    assert not root.parent.exists()
    open_root(root)
    assert is_marked(root) and root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "below a file"])
def test_what_is_no_directory_is_refused(root: Path, kind: str) -> None:
    path = root.parent / "named"
    path.symlink_to(root) if kind == "link" else path.touch()
    with pytest.raises(BadInput, match="not a directory"):
        open_root(path / "below" if kind == "below a file" else path)
    assert not list(root.iterdir())


def test_one_that_others_may_enter_is_refused_by_a_look(root: Path) -> None:
    root.chmod(0o750)
    with pytest.raises(AccessDenied, match="not private"):
        check_root(root)


def test_one_that_cannot_be_made_is_named() -> None:
    with pytest.raises(AccessDenied, match=r"/proc/nope cannot be made or written: "):
        open_root(Path("/proc/nope"))
