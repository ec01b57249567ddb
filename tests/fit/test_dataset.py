"""Calibration text from the Hub, through the real client and a loopback Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from loopback_hub.store import Repo
from support.prose import documents
from support.tiny import make_tokenizer

from kvhub.errors import BadInput, KvhubError, NotFound, Unreachable
from kvhub.fit.calibration import calibration_set
from kvhub.fit.dataset import Dataset, read_dataset
from kvhub.fit.settings import FitSettings
from kvhub.fit.source_text import Texts

pq = pytest.importorskip("pyarrow.parquet")
NAME = "org/prose"
TEXTS = documents(3000)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    import huggingface_hub.constants
    from huggingface_hub import HfFileSystem

    with LoopbackHub(tmp_path / "hub").serve() as served:
        for name, value in {**served.environment, "HF_HOME": str(tmp_path / "hf")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        HfFileSystem.clear_instance_cache()
        yield served


def publish(hub: LoopbackHub, files: dict[str, bytes]) -> str:
    repo = hub.store.repos.setdefault(NAME, Repo(NAME))
    return repo.add({name: hub.store.put(data) for name, data in files.items()}, "data").sha


def parquet(texts: list[str], column: str = "text") -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    table = pa.table({"id": range(len(texts)), column: texts, "blob": [TEXTS[0] * 40] * len(texts)})
    pq.write_table(table, sink, row_group_size=50, compression="none", use_dictionary=False)
    return sink.getvalue().to_pybytes()


def test_parquet_is_read_by_its_text_column_only_as_far_as_wanted(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = publish(
        hub,
        {"README.md": b"#", "data/a.parquet": parquet(TEXTS[:2000]), "data/b.parquet": parquet(TEXTS[2000:])},
    )
    size = len(parquet(TEXTS[:2000]))
    found, pinned = read_dataset(
        Dataset.parse(NAME), characters=20_000, cache=tmp_path / "cache", tokenizer=None
    )
    assert pinned == commit
    assert found == TEXTS[: len(found)] and 20_000 <= sum(map(len, found)) < 20_000 + max(map(len, found))
    fetched = [path for _, path, _, _ in hub.log if "/resolve/" in path]
    assert fetched and not any("b.parquet" in path for path in fetched)
    assert size > 20_000_000  # of which a few blocks were asked for

    # A fit that is started again reads the same text, without the Hub where the commit is named.
    publish(hub, {"data/a.parquet": parquet(TEXTS[100:200])})
    hub.log.clear()
    again, _ = read_dataset(
        Dataset.parse(f"{NAME}@{commit}"), characters=20_000, cache=tmp_path / "cache", tokenizer=None
    )
    assert again == found and not hub.log
    [kept] = (tmp_path / "cache").rglob("*.jsonl")
    whole = kept.read_bytes()
    for damaged in (whole.replace(b"a", b"b", 1), whole[:-80], b"\xff" + whole, b""):
        kept.write_bytes(damaged)
        with pytest.raises(KvhubError, match="was damaged and is removed"):
            read_dataset(
                Dataset.parse(f"{NAME}@{commit}"), characters=20_000, cache=tmp_path / "cache", tokenizer=None
            )
        assert not kept.exists()
    moved, other = read_dataset(
        Dataset.parse(f"{NAME}/data"), characters=20_000, cache=tmp_path / "cache", tokenizer=None
    )
    assert other != commit and moved[0] == TEXTS[100]


def test_json_lines_and_what_is_no_data_set(hub: LoopbackHub, tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "score": 1}) for text in TEXTS[:300]]
    publish(hub, {"en/x.jsonl": "\n".join(lines).encode(), "bad/y.jsonl": b'{"text": "a"}\n[1]\n'})

    def read(name: str) -> list[str]:
        return read_dataset(Dataset.parse(name), characters=10**9, cache=tmp_path, tokenizer=None)[0]

    assert read(f"{NAME}/en") == TEXTS[:300]
    for name, kind, says in (
        (f"{NAME}/bad", BadInput, "line 2 of org/prose/bad/y.jsonl is not a JSON object"),
        (f"{NAME}/fr", BadInput, "no Parquet or JSONL file in fr"),
        (f"{NAME}@v9", NotFound, "no revision 'v9'"),
        ("org/absent", NotFound, "no repository org/absent"),
    ):
        with pytest.raises(kind, match=says):
            read(name)


def test_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unreachable):
        read_dataset(Dataset.parse(NAME), characters=10, cache=tmp_path, tokenizer=None)


def test_mixtures_of_files_and_data_sets(hub: LoopbackHub, tmp_path: Path) -> None:
    commit = publish(hub, {"x.jsonl": "\n".join(json.dumps({"text": text}) for text in TEXTS).encode()})
    (tmp_path / "a.txt").write_text("\n\n".join(documents(300, seed=5)))
    (tmp_path / "b:2.txt").write_text("\n\n".join(documents(300, seed=6)))
    given = Texts.parse([f"{tmp_path}/a.txt:3", f"{tmp_path}/b:2.txt"], [f"{NAME}@{commit}:0.5"])
    corpora = given.read(None, FitSettings(sequences=4, length=64), tmp_path / "cache")
    assert [(c.name, c.weight, c.revision) for c in corpora] == [
        ("a", 3, None),
        ("b:2", 1, None),
        (NAME, 0.5, f"commit:{commit}"),
    ]
    whole = calibration_set(corpora, make_tokenizer(320), sequences=4, length=64)
    assert whole.revision is None and f"{NAME}@" in whole.dataset
    assert f" of commit:{commit} x0.5" in whole.dataset and whole.dataset.count("commit:") == 1


@pytest.mark.parametrize("name", ["prose", "org/prose/../x", "org/prose@", "a b/c", "org/prose@;rm"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(BadInput):
        Dataset.parse(name)


def test_weights_that_are_none_and_no_text_at_all() -> None:
    for files, sets in (([], []), (["a.txt:0"], []), (["a.txt:inf"], []), ([], ["org/name:-1"])):
        with pytest.raises(KvhubError):
            Texts.parse(files, sets)
