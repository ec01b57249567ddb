"""A home that is not what it seems: its registry lost or elsewhere, its place a file; and odd arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.published import make_artifact
from support.stored import stored

from kvhub.catalog import open_registry
from kvhub.store.lifecycle import name


@pytest.mark.parametrize("how", ["gone", "empty"])
def test_a_lost_registry_is_said_by_what_shows_mappers(shell, how: str) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings, 1).digest
    stored(shell.settings, 2)
    database = shell.settings.database_file
    for part in ("", "-wal", "-shm"):
        Path(f"{database}{part}").unlink(missing_ok=True)
    if how == "empty":
        database.write_bytes(b"")
    said = "2 mappers in "
    for command in (("list",), ("list", "--format", "json"), ("list", "--state", "ready"), ("matrix",)):
        done = shell.run(*command)
        assert done.stderr.count(said) == 1 and "kvhub register" in done.stderr, command
        assert "no mappers yet" not in done.stderr
    for command in (("search", "--local", "x"), ("alias",)):
        assert said in shell.run(*command).stderr, command
    for command in (("info", digest[:12]), ("verify", "prod"), ("diff", digest, "x")):
        assert said in shell.run(*command, code=3).stderr, command
    assert said in shell.run("lock", code=2).stderr
    assert said in shell.run("plan", "org/small", "org/large", code=5).stderr
    shell.run("register", digest[:12])
    assert "1 mapper in " in shell.run("list").stderr
    shell.run("register")
    assert shell.run("list").stderr == ""
    assert "kvhub list shows" in shell.run("info", "abcdef", code=3).stderr


def test_a_lost_registry_is_said_without_libraries(shell) -> None:  # type: ignore[no-untyped-def]
    stored(shell.settings, 1)
    with open_registry(shell.settings) as registry:
        for row in registry.list():
            registry.remove(row.digest)
    code = (
        "import sys; from kvhub.cli import run; run(['list']);"
        "sys.exit(str(sorted({'torch', 'sqlmodel', 'pydantic'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=shell.environment, capture_output=True, text=True, check=False
    )
    assert "1 mapper in " in done.stderr and done.stderr.endswith("[]\n"), done.stderr


@pytest.mark.parametrize("called", ["a?b", "x%41", "50%", "a#b", "n\udcff"])
def test_a_home_is_its_own_whatever_it_is_called(shell, tmp_path: Path, called: str) -> None:  # type: ignore[no-untyped-def]
    home = tmp_path / "homes" / called
    shell.environment["KVHUB_HOME"] = str(home)
    shell.run("list")
    shell.run("matrix")
    assert [path.name for path in home.parent.iterdir()] == [called]
    assert (home / "registry.db").is_file()


def test_a_registry_that_an_earlier_kvhub_put_elsewhere_is_named(  # type: ignore[no-untyped-def]
    shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhub.settings import Settings

    home, before = tmp_path / "x%41", tmp_path / "xA" / "registry.db"
    monkeypatch.setenv("KVHUB_HOME", str(home))
    shell.environment["KVHUB_HOME"] = str(home)
    stored(Settings.load(), 1)
    for part in ("-wal", "-shm"):
        (home / f"registry.db{part}").unlink(missing_ok=True)
    before.parent.mkdir()
    (home / "registry.db").rename(before)
    assert str(before) in shell.run("list").stderr
    assert str(before) in shell.run("gc", code=6).stderr
    before.rename(home / "registry.db")
    assert shell.run("list").stderr == ""


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_home_that_is_a_file(shell, tmp_path: Path, place: str) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("x")
    shell.environment["KVHUB_HOME"] = str(tmp_path / place)
    for command in (("list",), ("pull", "o/m"), ("gc",), ("doctor", "--no-hub")):
        assert f"KVHUB_HOME {tmp_path / place}" in shell.run(*command, code=2).stderr, command


def test_what_is_no_number(shell) -> None:  # type: ignore[no-untyped-def]
    for option in ("--grace", "--fits"):
        for value in ("nan", "inf"):
            assert "no finite number" in shell.run("gc", option, value, code=2).stderr
    for option in ("--exchange-gib", "--mapper-gib", "--shadow"):
        assert option in shell.run("serve", "m", option, "nan", code=2).stderr
    assert "finite" in shell.run("top", "--interval", "nan", code=2).stderr


def test_a_directory_without_a_slash(shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    digest = make_artifact(tmp_path / "big34").digest
    monkeypatch.chdir(tmp_path)
    assert "./big34 names the directory" in shell.run("verify", "big34", code=3).stderr
    assert shell.run("register", "big34").stdout.startswith(digest)
    assert len(shell.run("list").stdout.splitlines()) == 2


def test_long_names_are_not_repeated(shell) -> None:  # type: ignore[no-untyped-def]
    digest, long = stored(shell.settings, 1).digest, "a" * 100_000
    for code, command in (
        (2, ("alias", long, digest)),
        (2, ("alias", long)),
        (2, ("alias", "--remove", long)),
        (2, ("promote", digest, "--as", long)),
        (3, ("info", long)),
        (3, ("info", f"x/{long}")),
        (3, ("register", long)),
        (3, ("register", "a" * 60)),
    ):
        assert len(shell.run(*command, code=code).stderr) < 1000, command[0]


def test_diff_shows_equal_layers_with_all(shell) -> None:  # type: ignore[no-untyped-def]
    one, two = (stored(shell.settings, seed).digest for seed in (1, 2))
    assert "(the same)" not in shell.run("diff", one, two).stdout
    assert "0: 0 (the same)" in shell.run("diff", one, two, "--all").stdout.replace("0,1", "0")
    found = [
        json.loads(shell.run("diff", one, two, "--format", "json", *more).stdout)["layers"]
        for more in ((), ("--all",))
    ]
    assert not found[0] and len(found[1]) > 1


def test_rm_frees_what_nobody_else_has(shell) -> None:  # type: ignore[no-untyped-def]
    manifest = stored(shell.settings, 1)
    name("prod", manifest.digest, why="", settings=shell.settings)
    done = shell.run("rm", "@prod", "--yes")
    assert " freed" in done.stderr
    assert list((shell.settings.home / "blobs").iterdir()) == []
    assert shell.run("gc", "--grace", "0").stderr.startswith("0 deleted")


@pytest.mark.parametrize("what", ["mappers", "blobs"])
def test_doctor_sees_a_file_where_the_store_should_be(shell, what: str) -> None:  # type: ignore[no-untyped-def]
    shell.settings.home.mkdir()
    (shell.settings.home / what).touch()
    assert f"/{what} is not a directory" in shell.run("doctor", "--no-hub", code=1).stdout


def test_rm_of_a_row_without_files(shell) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings, 1).digest
    shutil.rmtree(shell.settings.mappers / digest)
    said = shell.run("rm", digest, "--yes").stderr
    assert "its files were gone already" in said and "other mappers" not in said
    shell.run("info", digest, code=3)


def test_ui_refuses_a_home_before_it_says_where_it_is(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("starlette")
    (tmp_path / "file").touch()
    done = shell.run("ui", "--port", "0", code=2, KVHUB_HOME=str(tmp_path / "file"))
    assert done.stdout == "" and "is not a directory" in done.stderr
