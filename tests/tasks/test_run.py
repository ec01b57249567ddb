"""Through lm-evaluation-harness itself, on real items and the shipped models."""

import json
import os
from pathlib import Path

import pytest
from support.mappers import identity_tensors, make_manifest, random_tensors

from kvhub.artifact.write import write_artifact
from kvhub.cli import run
from kvhub.errors import BadInput, NotFound
from kvhub.model.identify import identify
from kvhub.tasks.caches import Caches
from kvhub.tasks.conversation import read_conversations
from kvhub.tasks.run import Task, TaskSettings, run_tasks

ROOT = Path(__file__).parents[2]
SMALL, LARGE = ROOT / "models" / "small", ROOT / "models" / "large"
ARC = Path(__file__).parent / "arc_easy.jsonl"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_every_kind_of_item_is_answered_as_the_target_does_where_the_mapper_is_the_identity(
    mapper_between, tmp_path
):
    cloze = [
        {"question": f"{a} is cold and _ is hot.", "options": ["ice", "fire"], "gold": 1} for a in "ABCD"
    ]
    written = [{"question": f"{n} + 1?", "answer": f"So #### {n + 1}"} for n in range(4)]
    tasks = [
        Task.parse(f"arc={ARC}"),
        Task.parse(f"cloze={write(tmp_path / 'c', cloze)}"),
        Task.parse(f"sums={write(tmp_path / 's', written)}"),
    ]
    settings = TaskSettings(arms=("native", "mapped"), limit=4, fewshot=1)
    arc, cloze, sums = run_tasks(tasks, Caches(*mapper_between("small", "small")), settings)
    assert (arc.n, arc.metric, arc.chance) == (4, "acc_norm", 0.25)
    assert (cloze.metric, cloze.chance) == ("acc", 0.5)
    assert (sums.metric, sums.chance) == ("exact_match", 0)
    for found in (arc, cloze, sums):
        assert found.accuracy["native"] == found.accuracy["mapped"]


def test_a_task_that_is_not_there_and_a_name_twice(mapper_between):
    caches = Caches(*mapper_between("small", "small"))
    with pytest.raises(BadInput, match="same name"):
        run_tasks([Task.parse(f"a={ARC}")] * 2, caches, TaskSettings())
    with pytest.raises(BadInput, match="too few for 24 examples"):
        run_tasks([Task.parse(f"a={ARC}")], caches, TaskSettings(fewshot=24))
    with pytest.raises(NotFound, match="no task 'no_such_task'"):
        run_tasks([Task.parse("no_such_task")], caches, TaskSettings())


TALK = {
    "story": "Ann has a red boat.",
    "questions": [{"input_text": "What has Ann?"}, {"input_text": "Which colour?"}],
    "answers": [{"input_text": "a boat"}, {"input_text": "red"}],
}


def test_the_command_writes_what_it_prints(tmp_path, capfd, monkeypatch):
    manifest = make_manifest(identify(SMALL, dtype="float32"), identify(LARGE, dtype="float32"), k=1)
    manifest = write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    talks = write(tmp_path / "t.jsonl", [TALK, TALK])
    args = ["--task", f"arc={ARC}", "--limit", "6", "--conversations", str(talks), "--turns", "3"]
    models = ["--source", str(SMALL), "--target", str(LARGE)]
    arms = ["--arm", "native", "--arm", "source", "--arm", "mapped", "--arm", "wrong-document"]
    place = ["--output", str(tmp_path / "out.json"), "--format", "json"]
    assert run(["tasks", str(tmp_path / "m"), *args, *models, *arms, *place]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text())
    assert printed == json.loads((tmp_path / "m" / "assets" / "tasks.json").read_text())
    assert printed["mapper"] == manifest.digest
    assert set(printed["tasks"][0]["accuracy"]) == {"native", "source", "mapped", "wrong-document"}
    assert [(turn["turn"], turn["n"]) for turn in printed["turns"]] == [(1, 2), (2, 2)]
    assert run(["verify", str(tmp_path / "m")]) == 0
    capfd.readouterr()
    monkeypatch.chdir(tmp_path)  # no repository: the harness asks git for its commit, which complained
    assert run(["tasks", str(tmp_path / "m"), *args[:4], *models]) == 0
    out, err = capfd.readouterr()
    assert "arc  n 6, acc_norm, chance 0.250" in out
    assert "retention" in out
    # the record of the first run may have taken hours: it is kept
    before = tmp_path / "m" / "assets" / "tasks-1.json"
    assert err == f"the record that was there is {before} now\n"
    assert json.loads(before.read_text()) == printed
    assert printed["settings"]["exact_prefix"] == 0


def test_nothing_to_do_and_another_model_are_refused(tmp_path, capsys):
    manifest = make_manifest(identify(SMALL, dtype="float32"), identify(SMALL, dtype="float32"), k=1)
    write_artifact(tmp_path / "m", manifest, identity_tensors(manifest))
    assert run(["tasks", str(tmp_path / "m")]) == 2
    assert "there is no task" in capsys.readouterr().err
    own = ["--source", str(SMALL), "--target", str(SMALL)]
    assert run(["tasks", str(tmp_path / "m"), "--task", f"a={ARC}", "--chat", *own]) == 2
    assert "the pair has no chat template" in capsys.readouterr().err
    wrong = ["--source", str(SMALL), "--target", str(LARGE)]
    assert run(["tasks", str(tmp_path / "m"), "--task", f"a={ARC}", *wrong]) == 7
    assert "is not the mapper's" in capsys.readouterr().err


def test_arms_and_places_are_checked_before_a_model_is_loaded(tmp_path, capsys):
    manifest = make_manifest(identify(SMALL, dtype="float32"), identify(SMALL, dtype="float32"), k=1)
    write_artifact(tmp_path / "m", manifest, identity_tensors(manifest))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    models = ["--source", "no/such", "--target", "no/such"]  # would be refused with 3
    tasks = ["tasks", str(tmp_path / "m"), "--task", f"a={ARC}", *models]
    for output in ("link", "pipe", "m/manifest.json/x", "n" * 256):
        assert run([*tasks, "--output", str(tmp_path / output)]) == 2, output
    assert run([*tasks, "--arm", "native"]) == 2
    assert "native and mapped are needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("none.json", {"data": []}),
        ("more.json", {"data": [TALK | {"additional_answers": [1]}]}),
    ],
)
def test_conversations_that_are_none(tmp_path, name, content):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(BadInput, match="holds no conversations"):
        read_conversations(tmp_path / name)


def test_half_a_character_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"question": "a \\ud800", "answer": "b"}\n')
    with pytest.raises(BadInput, match="half a character"):
        Task.parse(f"t={tmp_path / 't.jsonl'}")
