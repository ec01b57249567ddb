"""What the demo reads: two domains, and stretches that no fit has seen."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvhub.fit.text import read_documents, split_documents

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _root_on_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield


def test_code_comes_from_this_python(tmp_path: Path) -> None:
    from demo.text import write_code

    count = write_code(tmp_path / "code.jsonl")
    found = [json.loads(line)["text"] for line in (tmp_path / "code.jsonl").read_text().splitlines()]
    assert len(found) == count == len(read_documents([tmp_path / "code.jsonl"])) > 40
    assert any("class TextWrapper" in text for text in found)


def test_stories_are_held_out_text() -> None:
    from demo.text import WIKIPEDIA, stories

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "small")
    told = stories(tokenizer, ROOT, count=6, tokens=640)
    assert [len(ids) for ids in told] == [640] * 6
    calibration, held_out = split_documents(read_documents([ROOT / WIKIPEDIA]))
    for ids in told:
        text = tokenizer.decode(ids)
        assert any(text in document for document in held_out)
        assert not any(text in document for document in calibration)


def test_too_few_stories_end_the_demo() -> None:
    from demo.text import stories

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "small")
    with pytest.raises(SystemExit, match="held-out stretches"):
        stories(tokenizer, ROOT, count=10_000, tokens=640)
