from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.prose import documents, write_text
from support.tiny import make_tokenizer
from transformers import PreTrainedTokenizerFast

from kvhub.errors import AccessDenied, BadInput, KvhubError, NotFound
from kvhub.fit.text import read_documents, split_documents, token_digest, windows


def read(tmp_path: Path, content: str | bytes, name: str = "text.txt") -> list[str]:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_documents([path])


MANY = documents(25, words=5)


@pytest.mark.parametrize(
    "separator", ["\n<|endoftext|>\n", "\f", "\n\n\n", "\n \n\t\n", "\n\n", "\n", "\r\n\r\n"]
)
def test_every_separator_gives_the_same_documents(tmp_path: Path, separator: str) -> None:
    assert read(tmp_path, separator.join(MANY)) == MANY


def test_wikiextractor_tags_are_separators_and_not_text(tmp_path: Path) -> None:
    content = "".join(
        f'<doc id="{n}" title="x">\n{text}\n\n\n\nmore\n</doc>\n' for n, text in enumerate(MANY)
    )
    assert read(tmp_path, content) == [f"{text}\n\n\n\nmore" for text in MANY]


def test_the_strongest_separator_that_gives_enough_documents_wins(tmp_path: Path) -> None:
    articles = [f"Title {n}\n\nfirst {text}\n\nsecond" for n, text in enumerate(MANY)]
    assert read(tmp_path, "\n\n\n".join(articles)) == articles
    few = read(tmp_path, "\n\n\n".join(articles[:3]))
    assert len(few) == 9  # three articles are not enough: their paragraphs it is


def test_json_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one\u2028two"}, ensure_ascii=False), "", '{"text": "x\\ud800y", "id": 3}']
    assert read(tmp_path, "\n".join(lines), "a.jsonl") == ["one\u2028two", "x?y"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b" \n\n \n", "holds no text"),
        ("a.txt", b"\x7fELF\0\0", "binary"),
        ("a.txt", b"caf\xe9 au lait", "not UTF-8 text (byte 3)"),
        ("a.jsonl", b'{"text": "a"}\nnonsense', "line 2"),
        ("a.jsonl", b'{"body": "a"}', "line 1"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.jsonl", b'{"text": " "}', "holds no text"),
    ],
)
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, content, name)
    assert says in caught.value.message and name in caught.value.message
    assert "\n" not in caught.value.message


def test_absent_directory_and_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFound):
        read_documents([tmp_path / "absent.txt"])
    with pytest.raises(BadInput, match="directory"):
        read_documents([tmp_path])

    def refuse(path: Path, mode: str = "r") -> None:
        raise PermissionError(13, "no")

    write_text(tmp_path / "a.txt", 3)
    monkeypatch.setattr(Path, "open", refuse)  # root may read anything, so the mode bits cannot
    with pytest.raises(AccessDenied):
        read_documents([tmp_path / "a.txt"])


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(KvhubError, match="larger than 1 GiB"):
        read_documents([path])


def test_the_split_depends_on_content_alone() -> None:
    texts = documents(2000, words=8)
    calibration, held_out = split_documents(texts)
    assert sorted(calibration + held_out) == sorted(set(texts))
    assert 0.08 < len(held_out) / len(texts) < 0.12
    # Other order, other company, other seed, repeated: every document keeps its side.
    other = split_documents([*reversed(texts[:500]), *texts[:500], "something else"], seed=7)
    assert set(other[0]) - {"something else"} <= set(calibration)
    assert set(other[1]) - {"something else"} <= set(held_out)
    assert split_documents(list(reversed(texts))) == (calibration, held_out)
    assert split_documents(texts, seed=7)[0] != calibration
    assert sorted(split_documents(texts, seed=7)[0]) == sorted(calibration)


def test_windows_are_the_packed_tokens() -> None:
    tokenizer = make_tokenizer(320)
    texts = documents(70, words=9)
    separator = tokenizer("\n\n")["input_ids"]
    expected = [i for text in texts for i in tokenizer(text)["input_ids"] + separator]
    cut = windows(texts, tokenizer, length=50)
    assert cut.dtype == torch.int64
    assert cut.flatten().tolist() == expected[: len(expected) // 50 * 50]
    assert torch.equal(windows(texts, tokenizer, length=50, limit=3), cut[:3])
    assert torch.equal(windows(texts, tokenizer, length=50, limit=3, start=2), cut[2:5])
    assert windows(texts[:1], tokenizer, length=5000, limit=3).shape == (0, 5000)
    assert windows([], tokenizer, length=50).shape == (0, 50)


def test_windows_begin_as_the_tokenizer_begins_a_text() -> None:
    from tokenizers import processors

    plain = make_tokenizer(320)
    backend = type(plain.backend_tokenizer).from_str(plain.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    texts = documents(10)
    cut = windows(texts, tokenizer, length=20)
    assert cut[:, 0].tolist() == [0] * len(cut)
    assert torch.equal(cut[:, 1:], windows(texts, plain, length=19))
    with pytest.raises(BadInput, match="1 tokens"):
        windows(texts, tokenizer, length=1)


def test_the_digest_knows_tokens_order_and_lengths() -> None:
    one, two = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    digests = {
        token_digest(batches)
        for batches in (
            [one, two],
            [two, one],
            [one],
            [torch.cat((one, two), 1)],
            [torch.cat((one, two))[:, :2]],
        )
    }
    assert len(digests) == 5
    assert token_digest([torch.cat((one, two))]) == token_digest([one, two])


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def chatting(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(320).backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def conversation(number: int) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": f"{MANY[number % len(MANY)]} {number}?"},
            {"role": "assistant", "content": "yes"},
        ]
    }


def test_conversations_are_written_by_the_chat_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(conversation(number)) for number in range(400)))
    found = read_documents([path], tokenizer=chatting())
    assert found[0] == f"<user>{MANY[0]} 0?\n<assistant>yes\n" and len(found) == 400

    # Another model's template writes the same conversation otherwise; its side stays what it was.
    other = read_documents([path], tokenizer=chatting("{{ messages[0].content }} !"))
    sides = [set(split_documents(side)[1]) for side in (found, other)]
    assert sides[0] and [a in sides[0] for a in found] == [b in sides[1] for b in other]


@pytest.mark.parametrize(
    ("line", "tokenizer", "says"),
    [
        (conversation(0), None, "no chat template"),
        ({"messages": [{"role": "user"}]}, chatting(), 'needs a "role" and a "content"'),
        ({"messages": []}, chatting(), 'needs a "role" and a "content"'),
        (conversation(0), chatting("{{ raise_exception('roles must alternate') }}"), "roles must alternate"),
        (conversation(0), chatting("{% for %}"), "the chat template refuses it"),
    ],
)
def test_conversations_that_cannot_be_written(
    tmp_path: Path, line: dict[str, object], tokenizer: PreTrainedTokenizerFast | None, says: str
) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(line))
    with pytest.raises(BadInput, match=says) as caught:
        read_documents([tmp_path / "chat.jsonl"], tokenizer=tokenizer)
    assert "line 1" in caught.value.message and "\n" not in caught.value.message


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "text": ["one", None, " two "]}), path)
    assert read_documents([path]) == ["one", "two"]
    pq.write_table(pa.table({"messages": [conversation(n)["messages"] for n in range(3)]}), path)
    assert read_documents([path], tokenizer=chatting())[2] == f"<user>{MANY[2]} 2?\n<assistant>yes\n"
    pq.write_table(pa.table({"body": ["x"]}), path)
    for content, kind, says in (
        (None, BadInput, 'neither a "text" nor a "messages" column'),
        (b"PAR1 but not really", BadInput, "cannot be read as Parquet"),
        (b"", BadInput, "cannot be read as Parquet"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(kind, match=says):
            read_documents([path])
    pq.write_table(pa.table({"text": [f"document {n} " * 50 for n in range(500)]}), path)
    data = bytearray(path.read_bytes())
    data[60:400] = bytes(340)  # in a page: the footer is whole
    path.write_bytes(data)
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        read_documents([path])
    with pytest.raises(NotFound):
        read_documents([tmp_path / "absent.parquet"])
