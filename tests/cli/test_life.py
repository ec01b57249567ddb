"""promote, retire, alias, diff, gc, lock, pull --locked, sign, trust, doctor: as a user runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from support.published import publishable
from support.stored import stored

from kvhub.catalog import find
from kvhub_registry import State

REPO = "tester/mapper"


def test_a_life_by_command(shell) -> None:  # type: ignore[no-untyped-def]
    one, two = stored(shell.settings, 1).digest, stored(shell.settings, 2).digest
    assert "@prod is" in shell.run("promote", one, "--as", "@prod").stdout
    assert f"was {one[:12]}" in shell.run("alias", "prod", two[:8]).stdout
    assert two in shell.run("info", "@prod").stdout
    shell.run("retire", "@prod", code=2)
    assert "needs a reason" in shell.run("retire", "@prod", "--why", " ", code=2).stderr
    done = shell.run("retire", "@prod", "--why", "slower")
    assert "still named @prod" in done.stderr
    assert "retired: slower" in shell.run("info", two).stdout
    listed = json.loads(shell.run("alias", "--format", "json").stdout)
    assert [(row["alias"], row["state"]) for row in listed] == [("@prod", "retired")]
    assert "kept" in shell.run("gc").stderr
    shell.run("alias", "--remove", "prod")
    shell.run("info", "@prod", code=3)
    assert json.loads(shell.run("gc", "--dry-run", "--format", "json").stdout)["size"] > 0
    assert find(two, shell.settings).state is State.RETIRED
    assert two[:12] in shell.run("gc").stdout
    shell.run("info", two, code=3)
    for wrong in (
        ("alias", "prod"),
        ("alias", "--remove"),
        ("alias", "facade", one),
        ("alias", "a", one, "--remove"),
    ):
        shell.run(*wrong, code=2)


def test_diff(shell) -> None:  # type: ignore[no-untyped-def]
    one, two = stored(shell.settings, 1).digest, stored(shell.settings, 2, top1=0.85).digest
    out = shell.run("diff", one, two).stdout
    assert "2026-11-29T12:00:01Z" in out
    assert "0.9500 [0.9400, 0.9600]" in out
    found = json.loads(shell.run("diff", one, two, "--format", "json").stdout)
    better = {(s["domain"], s["metric"]): s["better"] for s in found["scores"]}
    assert (better["all", "top1"], better["all", "kl"]) == ("A", "same")
    assert [s["name"] for s in found["settings"] if not s["same"]] == ["created"]
    assert found["layers"] == []


def test_a_lock_gives_the_same_bytes_elsewhere_and_offline(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    shell.run("pull", REPO)
    shell.run("alias", "prod", REPO)
    lock = tmp_path / "kvhub.lock"
    shell.run("lock", "@prod", "-o", lock)
    entry = json.loads(lock.read_text())["mappers"][0]
    assert (entry["digest"], entry["repo"], entry["aliases"]) == (manifest.digest, REPO, ["prod"])
    assert entry["commit"] == hub.store.repos[REPO].head.sha
    # the repository moves on; the lock does not
    publishable(tmp_path / "newer", seed=9)
    shell.run("push", tmp_path / "newer", REPO)
    other = type(shell)(shell.environment | {"KVHUB_HOME": str(tmp_path / "home2")})
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        pulled = other.run("pull", "--locked", "--lock", lock, **more).stdout
        assert pulled.startswith(manifest.digest)
        assert " ready " in pulled
    assert find("@prod", other.settings).digest == manifest.digest
    empty = type(shell)(shell.environment | {"KVHUB_HOME": str(tmp_path / "home3")})
    empty.run("pull", "--locked", "--lock", lock, code=5, HF_HUB_OFFLINE="1")
    entry["digest"] = "0" * 64
    lock.write_text(json.dumps({"version": 1, "mappers": [entry]}))
    assert "holds mapper" in empty.run("pull", "--locked", "--lock", lock, code=6).stderr
    assert not list((tmp_path / "home3" / "mappers").glob("[0-9a-f]*"))
    for text in ("{", '{"version": 2, "mappers": []}', '{"version": 1, "mappers": [{"digest": "x"}]}'):
        lock.write_text(text)
        said = empty.run("pull", "--locked", "--lock", lock, code=7 if "2" in text else 6).stderr
        assert "repository itself" not in said and ("2" in text or "kvhub lock writes it anew" in said)
    empty.run("pull", "--locked", "--lock", tmp_path / "absent", code=3)
    empty.run("pull", code=2)
    empty.run("pull", REPO, "--locked", code=2)


def test_a_lock_is_not_believed_beyond_what_is_here(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO)
    shell.run("pull", REPO)
    lock = tmp_path / "kvhub.lock"
    shell.run("lock", REPO, "-o", lock)
    content = json.loads(lock.read_text())
    before = find(REPO, shell.settings)
    for name in ("a b", "-x", "a" * 127, "org/name"):
        content["mappers"][0]["aliases"] = [name]
        lock.write_text(json.dumps(content))
        assert "is not an alias" in shell.run("pull", "--locked", "--lock", lock, code=2).stderr
    content["mappers"][0] |= {"aliases": [], "repo": "tester/nowhere", "commit": "0" * 40}
    lock.write_text(json.dumps(content))
    shell.run("pull", "--locked", "--lock", lock)
    after = find(REPO, shell.settings)
    assert (after.locations, after.aliases) == (before.locations, before.aliases)


def test_a_lock_of_what_is_not_ready_says_so(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings, 1).digest
    shell.run("push", digest, REPO)
    shell.run("retire", digest, "--why", "worse than before")
    said = shell.run("lock", digest, "-o", tmp_path / "kvhub.lock").stderr
    assert f"{digest[:12]} is retired: worse than before" in said


def test_lock_needs_the_hub(shell) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings).digest
    assert "kvhub push" in shell.run("lock", digest, code=2).stderr
    said = shell.run("lock", code=2).stderr
    assert f"on no Hub: {digest[:12]}" in said and "kvhub push" in said


def test_what_is_here_works_offline(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    shell.run("push", tmp_path / "made", REPO, "--tag", "v1")
    shell.run("pull", f"{REPO}@v1")
    commit = hub.store.repos[REPO].tags["v1"]
    for reference in (f"{REPO}@v1", f"{REPO}@{commit}", f"{REPO}@{commit[:8]}", REPO):
        assert manifest.digest in shell.run("pull", reference, HF_HUB_OFFLINE="1").stdout
    shell.run("pull", f"{REPO}@v2", code=5, HF_HUB_OFFLINE="1")
    shutil.rmtree(shell.settings.mappers / manifest.digest)
    shell.run("pull", REPO, code=5, HF_HUB_OFFLINE="1")


def test_a_proposal(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    publishable(tmp_path / "old")
    manifest = publishable(tmp_path / "new", seed=4)
    shell.run("push", tmp_path / "old", REPO)
    head = hub.store.repos[REPO].head.sha
    out = shell.run("push", tmp_path / "new", REPO, "--create-pr").stdout
    assert out.splitlines()[1] == f"{hub.url}/{REPO}/discussions/1"
    repo = hub.store.repos[REPO]
    assert repo.head.sha == head
    # it is known as what it is, and no place of the mapper before somebody merges it
    proposed = stored(shell.settings, 4).digest
    shell.run("push", proposed, REPO, "--create-pr")
    shell.run("info", REPO, code=3)
    assert f"{REPO}@refs/pr/2" in shell.run("info", proposed).stdout
    assert "pushed to" not in shell.run("info", proposed).stdout
    assert json.loads(shell.run("info", f"{REPO}@refs/pr/2", "--format", "json").stdout)["locations"] == []
    assert "is on no Hub" in shell.run("lock", proposed, code=2).stderr
    assert manifest.digest in shell.run("pull", f"{REPO}@refs/pr/1").stdout
    shell.run("push", tmp_path / "new", "tester/absent", "--create-pr", code=3)


def test_a_proposal_that_is_pulled(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """It is no place of the mapper either: not before main is pulled, and not after."""
    old = publishable(tmp_path / "old")
    manifest = publishable(tmp_path / "new", seed=4)
    shell.run("push", tmp_path / "old", REPO)
    head = hub.store.repos[REPO].head.sha
    shell.run("push", tmp_path / "new", REPO, "--create-pr")
    reader = type(shell)(shell.environment | {"KVHUB_HOME": str(tmp_path / "reader")})
    proposed = f"{REPO}@refs/pr/1"

    def locations(name: str) -> list[str]:
        found = json.loads(reader.run("info", name, "--format", "json").stdout)
        return [place["commit"] for place in found["locations"]]

    assert f"{manifest.digest}  " in reader.run("pull", proposed).stdout
    assert locations(proposed) == locations(manifest.digest) == []
    reader.run("info", REPO, code=3)
    lock = tmp_path / "reader.lock"
    assert "on no Hub: " in reader.run("lock", "-o", lock, code=2).stderr
    assert manifest.digest in reader.run("pull", proposed, HF_HUB_OFFLINE="1").stdout
    reader.run("pull", REPO)
    reader.run("pull", proposed)
    assert old.digest in reader.run("info", REPO).stdout
    said = reader.run("lock", "-o", lock)
    assert [(entry["digest"], entry["commit"]) for entry in json.loads(lock.read_text())["mappers"]] == [
        (old.digest, head)
    ]
    assert f"on no Hub: {manifest.digest[:12]}" in said.stderr
    shutil.rmtree(reader.settings.mappers / manifest.digest)
    assert f"kvhub pull {proposed}" in reader.run("verify", manifest.digest, code=3).stderr
    shell.run("push", tmp_path / "new", REPO, "--create-pr", "--tag", "v1", code=2)


def test_a_mapper_that_fails_the_gate_is_not_pushed(shell, hub: LoopbackHub) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings, top1=0.5).digest
    assert "does not pass the gate" in shell.run("push", digest, REPO, code=7).stderr
    assert hub.store.repos == {}
    shell.run("push", digest, REPO, "--allow-unevaluated")
    repo = hub.store.repos[REPO]
    assert "does not pass kvhub's gate" in hub.store.blob(repo.head.tree["README.md"]).read_text()


def test_signatures_travel(shell, hub: LoopbackHub, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("cryptography")
    digest = stored(shell.settings).digest
    key = tmp_path / "key.pem"
    public = shell.run("sign", "--new-key", key).stdout.split()[-1]
    shell.run("push", digest, "tester/unsigned")
    shell.run("sign", digest, "--key", key)
    assert "validly signed by a key" in shell.run("verify", digest).stdout
    shell.run("push", digest, REPO)
    other = type(shell)(shell.environment | {"KVHUB_HOME": str(tmp_path / "home2")})
    other.run("trust", "our team", public, "--require")
    assert "signed by our team" not in other.run("pull", "tester/unsigned", code=7).stderr
    assert list((tmp_path / "home2" / "mappers").glob("[0-9a-f]*")) == []
    other.run("pull", REPO)
    assert "signed by our team" in other.run("verify", REPO).stdout
    other.run("trust", "our team", "--remove")
    other.run("verify", REPO, code=7)
    other.run("trust", "x", "not a key", code=2)


def test_a_typo_in_the_policy_is_a_refusal_and_costs_no_mapper(
    shell, hub: LoopbackHub, tmp_path: Path
) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings).digest
    publishable(tmp_path / "made", seed=4)
    shell.run("push", tmp_path / "made", REPO)
    policy = shell.settings.home / "trust.json"
    policy.write_text('{"require_signatures": true}')
    for command in (("verify", digest), ("promote", digest), ("pull", REPO), ("trust", "x", "0" * 64)):
        err = shell.run(*command, code=2).stderr
        assert str(policy) in err and "move it away" in err and "kvhub rm" not in err
    policy.unlink()
    assert "ready" in shell.run("info", digest).stdout
    gone = {"KVHUB_TRUST": str(tmp_path / "absent.json")}
    for command in (("verify", digest), ("pull", REPO), ("trust",)):
        assert "absent.json does not exist" in shell.run(*command, code=2, **gone).stderr
    shell.run("trust", "our team", "0" * 64, "--require", **gone)
    shell.run("pull", REPO, code=7, **gone)
    assert len(list(shell.settings.mappers.glob("[0-9a-f]*"))) == 1


def test_doctor(shell) -> None:  # type: ignore[no-untyped-def]
    digest = stored(shell.settings).digest
    found = {item["check"]: item for item in json.loads(shell.run("doctor", "--format", "json").stdout)}
    assert found["registry"]["found"] == "SQLite, 1 mappers, consistent"
    assert found["hub"]["result"] == "warns"  # offline
    assert found["mappers"]["result"] == "ok"
    (shell.settings.mappers / digest / "model.safetensors").unlink()
    (shell.settings.mappers / ".removed-x").mkdir()
    table = shell.run("doctor", "--no-hub", code=1).stdout
    assert "ready but damaged" in table
    assert "kvhub gc" in table
    shell.settings.home.joinpath("registry.db").write_bytes(b"garbage" * 1000)
    assert "damaged" in shell.run("doctor", "--no-hub", code=1).stdout


def test_a_lost_registry_by_command(shell) -> None:  # type: ignore[no-untyped-def]
    one, two = stored(shell.settings, 1).digest, stored(shell.settings, 2).digest
    shell.settings.home.joinpath("registry.db").write_bytes(b"garbage" * 1000)
    assert "kvhub register" in shell.run("list", code=6).stderr
    for path in shell.settings.home.glob("registry.db*"):
        path.unlink()
    assert "kvhub register" in shell.run("doctor", "--no-hub", code=1).stdout
    assert "kvhub register puts them back" in shell.run("gc", "--grace", "0", code=6).stderr
    assert one in shell.run("register", one[:8]).stdout
    assert "kvhub register" in shell.run("doctor", "--no-hub").stdout
    done = shell.run("gc", "--grace", "0")
    assert f"not registered: {two[:12]}" in done.stderr and "0 deleted" in done.stderr
    listed = json.loads(shell.run("gc", "--dry-run", "--format", "json").stdout)["unregistered"]
    assert [Path(item["path"]).name for item in listed] == [two]
    weights = shell.settings.mappers / two / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "was changed" in shell.run("register", code=6).stderr
    weights.write_bytes(whole)
    assert "ready" in shell.run("register").stdout
    assert "every mapper" in shell.run("register").stderr
    shell.run("register", "abcdef", code=3)


def test_doctor_asks_the_hub(shell, hub: LoopbackHub) -> None:  # type: ignore[no-untyped-def]
    found = {item["check"]: item for item in json.loads(shell.run("doctor", "--format", "json").stdout)}
    assert found["hub"]["found"].endswith("logged in as tester")
    wrong = json.loads(shell.run("doctor", "--format", "json", code=1, HF_TOKEN="hf_wrong").stdout)
    assert [item["result"] for item in wrong if item["check"] == "hub"] == ["FAILS"]
