"""`benchmarks/task_points.py`: answers on recorded rows are the command's; the same numbers twice."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from support.mappers import identity_tensors, make_manifest, random_tensors

from kvhub.artifact.write import write_artifact
from kvhub.tasks.caches import Caches
from kvhub.tasks.lm import MappedLM

ROOT = Path(__file__).parents[2]
SMALL, LARGE = ROOT / "models" / "small", ROOT / "models" / "large"
ARC = Path(__file__).parent / "arc_easy.jsonl"


@pytest.fixture
def points(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import task_points

    return task_points


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_lines_of_a_mapper_that_changes_nothing_and_of_one_that_changes_all(points, models, tmp_path):
    small, large = (models[name].identity for name in ("small", "large"))
    for name, pair, tensors in (
        ("same", (small, small), identity_tensors),
        ("noise", (small, large), random_tensors),
    ):
        manifest = make_manifest(*pair, k=1)
        write_artifact(tmp_path / name, manifest, tensors(manifest))

    def lines(target, mapper, output, *more):
        points.main([
            str(SMALL), str(target), "--task", f"options:arc={ARC}", "--task", f"letters:letter={ARC}@4",
            "--items", "4", "--block", "2", "--shots", "1", "--mapper", f"{mapper}={tmp_path / mapper}",
            "--turn", "0", "--wrong", mapper, "--record", str(tmp_path / "record"), "--output",
            str(tmp_path / output), *more,
        ])  # fmt: skip
        return read(tmp_path / output)

    found = {line["task"]: line for line in lines(SMALL, "same", "same.csv")}
    assert list(found) == ["arc", "letter", "all", "even", "odd"]
    assert [found[task]["n"] for task in found] == ["4", "4", "8", "4", "4"]
    for line in found.values():
        assert line["native"] == line["mapped"] == line["source_alone"]
        assert (line["loss"], line["agreement"]) == ("0", "1")
        assert abs(float(line["option_kl"])) < 1e-6
    assert found["all"]["empty"] != "" and found["all"]["wrong_document"] != ""

    first = lines(LARGE, "noise", "one.csv")
    assert lines(LARGE, "noise", "two.csv") == first
    assert lines(LARGE, "noise", "one.csv") == first  # not measured again
    assert float(first[2]["option_kl"]) > 0.01


def test_answers_in_one_batch_are_those_of_the_command(points, models, mapper_between):
    from benchmarks.task_items import Item
    from benchmarks.task_record import score
    from kvhub.tasks.caches import own_rows

    context = models["large"].tokenizer.encode("Question: which of these is cold?\nAnswer:")
    answers = [models["large"].tokenizer.encode(text) for text in (" ice", " a fire that burns", " the sun")]
    rows = own_rows(models["large"], torch.tensor(context[:-1]))
    item = Item(context, answers, [1] * 3, 0)
    lm = MappedLM(Caches(*mapper_between("small", "large")), "native")
    there = [lm._score(context, answer)[0] for answer in answers]
    halves = [
        type(rows)(tuple(k[part] for k in rows.keys), tuple(v[part] for v in rows.values))
        for part in (slice(0, 4), slice(4, None))
    ]
    assert score(models["large"], halves, len(context), context[-1], item.answers) == pytest.approx(there)
    letters = [[5], [9]]
    assert len(set(score(models["large"], [], 7, 3, letters))) == 2


def test_figures_against_numbers_worked_out_by_hand(points):
    from benchmarks.task_items import Block, Item, TaskSet

    items = [Item([1], [[1], [2]], [1, 1], gold) for gold in (0, 0, 1, 1)]
    task = TaskSet("t", [Block([], items[:2]), Block([], items[2:])])

    def scores(*leads):
        return [np.array([lead, 0.0]) for lead in leads]

    native, mapped = scores(2, 1, -1, 3), scores(1, -1, -2, 1)
    answered = points.Answered(task, native, mapped, scores(1, 1, 1, 1), mapped, native)
    found = points.summarize([answered])
    assert (found["n"], found["chance"], found["native"], found["mapped"]) == (4, 0.5, 0.75, 0.5)
    assert (found["empty"], found["wrong_document"]) == (0.5, 0.75)
    assert found["retention"] == pytest.approx(2 / 3)
    assert found["floor_normalised"] == 0
    assert found["agreement"] == 0.75
    assert found["margin_drop"] == pytest.approx((1 + 2 - 1 - 2) / 4)
    odd = points.summarize([answered], "odd")
    assert (odd["n"], odd["native"], odd["mapped"]) == (2, 0.5, 0.5)
    assert np.isnan(odd["floor_normalised"])  # native is no better than guessing


def test_diagnostics_are_compared_with_what_answers_lose(points):
    from benchmarks import correlation

    rows, tasks = [], []
    for pair in "ab":
        for number in range(5):
            key = {"pair": pair, "source": f"{pair}1", "target": f"{pair}2", "recipe": str(number)}
            text = {
                "excess_nll": number,
                "kl": -number,
                "top1": 1,
                "positions": 9,
                "attention_cosine": -number,
            }
            rows.append({name: str(value) for name, value in (key | text).items()})
            for part in ("all", "even", "odd", "arc"):
                line = {"agreement": 1 - number / 10, "option_kl": number, "margin_drop": -number}
                line |= {"native": 0.9 if pair == "a" else 0.3, "chance": 0.25, "n": 50}
                line |= {"floor_normalised": 1 - number / 10, "task": part}
                tasks.append({name: str(value) for name, value in (key | line).items()})
    points = correlation.Points(correlation.with_tasks(rows, tasks[:-4]), tasks=True)
    assert len(points.pair) == 9
    assert np.isnan(points.loss["retention_lost"][points.pair == "b"]).all()  # native is at chance
    found = {(row["loss"], row["predictor"]): row["pooled"] for row in correlation.table(points)}
    assert found["agreement", "attention_cosine"] == found["option_kl", "excess_nll"] == "1.000"
    assert found["option_kl", "kl"] == found["margin_drop", "attention_cosine"] == "-1.000"
    assert found["retention_lost", "excess_nll"] == found["option_kl", correlation.HALVES] == "1.000"
    assert ("agreement", "positions") not in found
