"""list, info, verify and rm, in a process of their own."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.published import make_artifact, make_evidence

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.catalog import find, record_evidence, register
from kvhub_registry import State


@pytest.fixture
def ready(shell) -> Manifest:  # type: ignore[no-untyped-def]
    """One evaluated mapper in the store, Qwen3-8B -> Qwen3-32B."""
    store = shell.settings.mappers
    manifest = make_artifact(store / "tmp", source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B")
    path = (store / "tmp").rename(store / manifest.digest)
    register(path, manifest, shell.settings)
    write_evidence(path, make_evidence(manifest))
    record_evidence(manifest, make_evidence(manifest), why="gate passed", settings=shell.settings)
    return manifest


def test_list_as_a_table_is_whole_and_plain(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    out = shell.run("list", COLUMNS="20", TERM="xterm-256color").stdout
    head, row = out.splitlines()
    assert "\x1b" not in out
    assert "…" not in out
    for cell in (ready.digest[:12], "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "0.001", "text 8", "0.980", "0.900"):
        assert cell in row
    assert "0.50/0.50" in row
    assert row.split()[-3:] == ["ready", *row.split()[-2:]]
    assert head.split()[0] == "DIGEST"


def test_list_for_programs(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    (row,) = json.loads(shell.run("list", "--format", "json").stdout)
    assert (row["digest"], row["state"], row["size"]) == (ready.digest, "ready", ready.size)
    assert (row["attention_cosine"], row["gap_recovered"], row["r2_key"]) == (0.98, 0.9, 0.5)
    assert row["created"] == "2026-11-29T12:00:00Z"
    (line,) = csv.DictReader(io.StringIO(shell.run("list", "--format", "tsv").stdout), delimiter="\t")
    assert (line["target"], line["size"], line["lambda"]) == ("Qwen/Qwen3-32B", str(ready.size), "0.001")
    assert shell.run("list", "--format", "quiet").stdout == ready.digest + "\n"


def test_filters(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    for arguments, count in (
        (("--target", "qwen3-32b"), 1),
        (("--target", "Qwen/Qwen3-32B", "--source", "qwen3-8b", "--state", "ready", "--family", "ridge"), 1),
        (("--target", "qwen3-8b"), 0),
        (("--state", "draft"), 0),
    ):
        assert len(json.loads(shell.run("list", *arguments, "--format", "json").stdout)) == count
    empty = shell.run("list", "--target", "nothing")
    assert (empty.stdout, empty.stderr) == ("", "no mapper matches\n")


def test_info(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    out = shell.run("info", ready.digest[:8]).stdout
    for part in (
        ready.digest,
        "commit:" + "a" * 40,
        "ready: gate passed",
        "lambda = 0.001 (of the mean diagonal)",
        "0<-0; 1<-1; 2<-0",
        "passed the gate",
    ):
        assert part in out, part
    described = json.loads(shell.run("info", "qwen3-8b->qwen3-32b", "--format", "json").stdout)
    assert described["manifest"]["k"] == 1
    assert described["verdict"]["passed"] is True


def test_verify_and_what_damage_does(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    path = shell.settings.mappers / ready.digest
    assert ready.digest in shell.run("verify", ready.digest[:8]).stdout
    assert "every sha256 agrees" in shell.run("verify", path, "--deep").stdout
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    shell.run("verify", ready.digest)  # names and sizes still agree
    damaged = shell.run("verify", ready.digest, "--deep", code=6)
    assert "sha256" in damaged.stderr
    assert find(ready.digest, shell.settings).state is State.DRAFT
    weights.unlink()
    assert "stays draft" in shell.run("verify", ready.digest, code=6).stderr


def test_verify_says_what_it_covers(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    path = shell.settings.mappers / ready.digest
    (path / "README.md").write_text("anything")
    lines = shell.run("verify", ready.digest).stdout.splitlines()
    assert lines[1].startswith("evidence: of this mapper, 16 windows, passes the gate")
    assert lines[2:] == ["origin: not signed", "not covered: README.md"]
    evidence = make_evidence(ready)
    write_evidence(path, evidence.model_copy(update={"created": "2026-11-30T00:00:00Z"}))
    changed = [s.model_copy(update={"value": 0.97}) if s.metric == "top1" else s for s in evidence.scores]
    write_evidence(path, evidence.model_copy(update={"scores": changed}))
    assert "other scores" in shell.run("verify", ready.digest).stderr


@pytest.mark.parametrize("damage", ["gone", "failing", "foreign"])
def test_ready_without_passing_evidence_becomes_a_draft(shell, ready: Manifest, damage: str) -> None:  # type: ignore[no-untyped-def]
    path = shell.settings.mappers / ready.digest
    if damage == "gone":
        (path / "evidence.json").unlink()
    elif damage == "failing":
        write_evidence(path, make_evidence(ready, top1=0.2))
    else:
        evidence = make_evidence(ready).model_copy(update={"mapper": "f" * 64})
        (path / "evidence.json").write_bytes(evidence.to_bytes())
    done = shell.run("verify", ready.digest, "--deep", code=6 if damage == "foreign" else 7)
    assert "is a draft now" in done.stderr and "Hint" in done.stderr
    assert find(ready.digest, shell.settings).state is State.DRAFT
    if damage != "foreign":
        shell.run("verify", ready.digest)  # a draft may be without


def test_rm(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    path = shell.settings.mappers / ready.digest
    assert "--yes" in shell.run("rm", ready.digest[:8], code=2).stderr
    assert path.exists()
    shell.run("rm", ready.digest[:8], "--yes")
    assert [item.name for item in shell.settings.mappers.iterdir()] == [".lock"]
    shell.run("info", ready.digest[:8], code=3)


def test_rm_leaves_files_outside_the_store(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = make_artifact(tmp_path / "mine")
    register(tmp_path / "mine", manifest, shell.settings)
    done = shell.run("rm", manifest.digest, "--yes")
    assert "its files stay" in done.stderr
    assert (tmp_path / "mine" / "manifest.json").exists()


def test_files_that_vanished(shell, ready: Manifest) -> None:  # type: ignore[no-untyped-def]
    import shutil

    shutil.rmtree(shell.settings.mappers / ready.digest)
    assert "files gone" in shell.run("list").stdout
    assert "problem" in shell.run("info", ready.digest).stdout
    assert "gone" in shell.run("verify", ready.digest, code=3).stderr
    shell.run("rm", ready.digest, "--yes")


def test_a_home_that_was_moved(shell, ready: Manifest, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Or a registry that machines share: the files are in this store, whatever path the row has."""
    with closing(sqlite3.connect(shell.settings.database_file)) as registry, registry:
        registry.execute("UPDATE kvhub_artifact SET path = '/of/another/machine/' || mapper_digest")
    assert "files gone" not in shell.run("list").stdout
    (one,) = json.loads(shell.run("list", "--format", "json").stdout)
    assert one["files_present"] is True
    shell.run("verify", ready.digest, "--deep")
    assert str(shell.settings.mappers / ready.digest) in shell.run("info", ready.digest).stdout
    assert "its files stay" not in shell.run("rm", ready.digest, "--yes").stderr
    assert [item.name for item in shell.settings.mappers.iterdir()] == [".lock"]


def test_errors(shell, ready: Manifest, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for arguments, code in (
        (("info", "nothing"), 3),
        (("verify", tmp_path / "absent"), 3),
        (("verify", tmp_path), 3),
        (("rm", "ffffff", "--yes"), 3),
        (("push", "nothing", "o/m"), 3),
        (("pull", "no-slash"), 2),
    ):
        assert shell.run(*arguments, code=code).stderr.startswith("Error: ")
    shell.run("list", code=2, KVHUB_DATABASE_URL="mysql://u:s3cret@h/d")
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database at all" * 50)
    done = shell.run("list", code=6, KVHUB_DATABASE_URL=f"sqlite:///{garbage}")
    assert len(done.stderr.splitlines()) == 2


def test_ambiguous_references_list_the_candidates(shell) -> None:  # type: ignore[no-untyped-def]
    digests = []
    for seed in (1, 2):
        path = shell.settings.mappers / str(seed)
        manifest = make_artifact(path, seed=seed)
        register(path, manifest, shell.settings)
        digests.append(manifest.digest)
    done = shell.run("info", "small-1b->large-7b", code=2)
    assert all(digest[:12] in done.stderr for digest in digests)
