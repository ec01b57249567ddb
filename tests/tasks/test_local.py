import json
import os
from pathlib import Path

import pytest

from kvhub.errors import BadInput, NotFound
from kvhub.tasks.conversation import f1, read_conversations
from kvhub.tasks.local import chance, digest, read_items
from kvhub.tasks.run import Task

GOOD = {"question": "2 + 2?", "options": ["3", "4"], "gold": 1}


def write(path, *items):
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items))
    return path


def test_items_are_read_with_what_counts(tmp_path):
    items = read_items(write(tmp_path / "a.jsonl", GOOD | {"id": 7}, "", GOOD | {"gold": 0}))
    assert [item["gold"] for item in items] == [1, 0]
    assert chance(items) == 0.5
    assert digest(items) != digest(items[::-1])
    assert chance([{"question": "?", "answer": "x"}]) == 0


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"])
def test_only_a_newline_ends_a_line(tmp_path, inside):
    item = json.dumps(GOOD | {"question": f"a{inside}b"}, ensure_ascii=False)
    assert len(read_items(write(tmp_path / "a.jsonl", item, item))) == 2
    talk = json.dumps(COQA | {"story": f"a{inside}b"}, ensure_ascii=False)
    assert read_conversations(write(tmp_path / "t.jsonl", talk))[0].story == f"a{inside}b"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "has no question"),
        ({"question": 1, "answer": "x"}, "has no question"),
        ({"question": "?"}, "neither options nor an answer"),
        ({"question": "?", "answer": ""}, "neither options nor an answer"),
        (GOOD | {"options": ["4"]}, "options must be"),
        (GOOD | {"options": ["4", ""]}, "not empty"),
        (GOOD | {"gold": 2}, "gold must be"),
        (GOOD | {"gold": True}, "gold must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(BadInput, match=message):
        read_items(write(tmp_path / "a.jsonl", line))


def test_bad_files(tmp_path):
    with pytest.raises(NotFound):
        read_items(tmp_path / "missing")
    with pytest.raises(BadInput, match="no items"):
        read_items(write(tmp_path / "a", "", " "))
    with pytest.raises(BadInput, match="mixes"):
        read_items(write(tmp_path / "a", GOOD, {"question": "?", "answer": "x"}))
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="cannot be read"):
        read_items(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        for read in (read_items, read_conversations):
            with pytest.raises(BadInput, match="not a regular file"):
                read(other)
    with pytest.raises(BadInput, match="no name for a task"):
        Task.parse(f"../x={tmp_path / 'a'}")


COQA = {
    "story": "A cat sat.",
    "questions": [{"input_text": "Who sat?"}, {"input_text": "Did it?"}],
    "answers": [{"input_text": "A cat"}, {"input_text": "Yes"}],
    "additional_answers": {"0": [{"input_text": "the cat"}, {"input_text": "it did"}]},
}


def test_conversations_as_coqa_writes_them(tmp_path):
    whole = tmp_path / "dev.json"
    whole.write_text(json.dumps({"version": "1.0", "data": [COQA, COQA]}))
    lines = write(tmp_path / "dev.jsonl", COQA | {"questions": {"input_text": ["Who sat?", "Did it?"]}})
    assert len(read_conversations(whole, limit=1)) == 1
    assert read_conversations(whole)[0] == read_conversations(lines)[0]
    talk = read_conversations(whole)[0]
    assert talk.answers == [["A cat", "the cat"], ["Yes", "it did"]]
    assert talk.history(0) == "A cat sat.\n\nQ: Who sat?\n\nA:"
    assert talk.history(1) == "A cat sat.\n\nQ: Who sat?\n\nA: A cat\n\nQ: Did it?\n\nA:"


@pytest.mark.parametrize("bad", ["{", "1", '{"story": "x", "questions": [], "answers": []}', '{"story": 1}'])
def test_bad_conversations_are_refused(tmp_path, bad):
    with pytest.raises(BadInput, match="no conversations"):
        read_conversations(write(tmp_path / "x.jsonl", bad))
    (tmp_path / "x.json").write_text(bad)
    with pytest.raises(BadInput):
        read_conversations(tmp_path / "x.json")


def test_f1_of_words():
    assert f1("The cat.", "a CAT") == 1
    assert f1("a black cat", "cat") == pytest.approx(2 / 3)
    assert f1("dog", "cat") == 0
    assert f1("the", "") == 1
    assert f1("", "cat") == 0
