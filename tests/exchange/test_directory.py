"""The directory exchange: bounded, checksummed, atomic, private."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.small_disk import filled, small_disk

from kvhub.errors import AccessDenied
from kvhub.exchange import (
    BlockCorrupt,
    BlockMissing,
    DirectoryExchange,
    Layout,
    Lineage,
    Namespace,
    chain_keys,
)
from kvhub.exchange.root import is_marked

MODEL = "a" * 64
LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
EXACT = Lineage(hops=0, mappers=[])
KEYS = chain_keys(Namespace(MODEL, "exact"), list(range(64 * 64)))


def payload(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def put(exchange: DirectoryExchange, index: int, lineage: Lineage = EXACT) -> bool:
    return exchange.put(
        KEYS[index], model=MODEL, position=64 * index, layout=LAYOUT, lineage=lineage, payload=payload(index)
    )


@pytest.fixture
def exchange(tmp_path: Path) -> DirectoryExchange:
    return DirectoryExchange(tmp_path / "exchange")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_comes_back_to_the_bit(exchange: DirectoryExchange, dtype: str) -> None:
    layout = LAYOUT.model_copy(update={"dtype": dtype})
    rows = payload(1).to(getattr(torch, dtype))
    lineage = Lineage(hops=2, mappers=["c" * 64])
    assert exchange.put(KEYS[0], model=MODEL, position=0, layout=layout, lineage=lineage, payload=rows)
    block = exchange.get(KEYS[0], model=MODEL, layout=layout)
    assert torch.equal(block.payload, rows) and block.header.lineage == lineage
    assert exchange.header(KEYS[0]) == block.header
    assert exchange.root.stat().st_mode & 0o777 == 0o700


def test_a_missing_block_is_missing(exchange: DirectoryExchange) -> None:
    assert exchange.header(KEYS[0]) is None
    with pytest.raises(BlockMissing):
        exchange.get(KEYS[0], model=MODEL, layout=LAYOUT)


def test_fewer_hops_replace_more_and_never_the_other_way(exchange: DirectoryExchange) -> None:
    two, one = Lineage(hops=2, mappers=["c" * 64]), Lineage(hops=1, mappers=["c" * 64])
    assert put(exchange, 0, two) and put(exchange, 0, one)
    assert not put(exchange, 0, two) and not put(exchange, 0, one)
    header = exchange.header(KEYS[0])
    assert header is not None and header.lineage.hops == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
        lambda data: b"",
        lambda data: data[:11],
        lambda data: b"X" + data[1:],
        lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
        lambda data: data.replace(b'"hops":0', b'"hops":1'),
        lambda data: data.replace(b'"position":0', b'"position":1'),
        lambda data: data.replace(MODEL.encode(), b"d" * 64),
        lambda data: data + b"\0" * (1 << 20),
    ],
)
def test_damage_is_refused_and_removed(exchange: DirectoryExchange, damage) -> None:  # type: ignore[no-untyped-def]
    put(exchange, 0)
    [path] = exchange.root.rglob("*.kv")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BlockCorrupt):
        exchange.get(KEYS[0], model=MODEL, layout=LAYOUT)
    assert not path.exists()


def test_another_models_block_is_refused(exchange: DirectoryExchange) -> None:
    put(exchange, 0)
    with pytest.raises(BlockCorrupt):
        exchange.get(KEYS[0], model="b" * 64, layout=LAYOUT)


def test_symbolic_links_are_not_followed(exchange: DirectoryExchange, tmp_path: Path) -> None:
    put(exchange, 0)
    [path] = exchange.root.rglob("*.kv")
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError):
        exchange.get(KEYS[0], model=MODEL, layout=LAYOUT)


def test_a_shared_directory_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(AccessDenied, match="not private"):
        DirectoryExchange(root)


def test_it_stays_below_its_bound_and_forgets_the_oldest(tmp_path: Path) -> None:
    one = LAYOUT.nbytes + 1024
    exchange = DirectoryExchange(tmp_path / "exchange", max_bytes=20 * one)
    for index in range(60):
        put(exchange, index)
        path = next(exchange.root.rglob(f"{KEYS[index].hex()}.kv"))
        os.utime(path, (1000 + index, 1000 + index))
        if index > 5:  # used again and again: it stays
            exchange.get(KEYS[3], model=MODEL, layout=LAYOUT)
        assert sum(p.stat().st_size for p in exchange.root.rglob("*.kv")) <= 20 * one
    assert exchange.header(KEYS[3]) is not None and exchange.header(KEYS[59]) is not None
    assert exchange.header(KEYS[7]) is None


def test_only_blocks_are_counted_and_removed(tmp_path: Path) -> None:
    one = LAYOUT.nbytes + 1024
    exchange = DirectoryExchange(tmp_path / "exchange", max_bytes=4 * one)
    put(exchange, 0)
    shard = next(exchange.root.rglob("*.kv")).parent
    others = [
        exchange.root / "Documents" / "thesis.odt",
        shard / "notes.kv",
        shard / f"{'g' * 64}.kv",
        exchange.root / f"{KEYS[0].hex()}.kv",
        exchange.root / "Documents" / f"{KEYS[1].hex()}.kv",
        shard / ".mine.part",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 5 * one)
        os.utime(path, (1, 1))  # the oldest of all
    exchange = DirectoryExchange(exchange.root, max_bytes=4 * one)
    assert exchange.header(KEYS[0]) is not None
    for index in range(1, 12):
        put(exchange, index)
    assert all(path.stat().st_size == 5 * one for path in others)
    assert sum(exchange.header(key) is not None for key in KEYS[:12]) in (3, 4)


def test_a_directory_that_was_removed_is_made_again(exchange: DirectoryExchange) -> None:
    put(exchange, 0)
    shutil.rmtree(exchange.root)
    with pytest.raises(FileNotFoundError, match="gone"):
        exchange.header(KEYS[0])
    with pytest.raises(BlockMissing):
        exchange.get(KEYS[0], model=MODEL, layout=LAYOUT)
    assert put(exchange, 0) and exchange.header(KEYS[0]) is not None and exchange.header(KEYS[1]) is None
    assert exchange.root.stat().st_mode & 0o777 == 0o700 and is_marked(exchange.root)


def test_what_took_its_place_is_left_alone(exchange: DirectoryExchange) -> None:
    put(exchange, 0)
    shutil.rmtree(exchange.root)
    exchange.root.write_text("a file")
    with pytest.raises(OSError, match="not a directory"):
        put(exchange, 0)
    assert exchange.root.read_text() == "a file"
    exchange.root.unlink()
    exchange.root.mkdir(mode=0o700)
    (exchange.root / "thesis.odt").touch()
    with pytest.raises(OSError, match="holds something else"):
        put(exchange, 0)
    assert [path.name for path in exchange.root.iterdir()] == ["thesis.odt"]


def test_a_block_larger_than_the_exchange_is_an_error_not_a_loop(tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange", max_bytes=1000)
    with pytest.raises(OSError, match="does not fit"):
        put(exchange, 0)
    assert not list(exchange.root.rglob("*.kv")) and not list(exchange.root.rglob("*.part"))


def test_a_disk_that_is_full_before_its_bound_forgets_the_oldest(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        exchange = DirectoryExchange(disk / "exchange")
        with filled(disk, leave=64 << 10):
            for index in range(40):
                assert put(exchange, index)
                path = next(exchange.root.rglob(f"{KEYS[index].hex()}.kv"))
                os.utime(path, (1000 + index, 1000 + index))
            assert exchange.header(KEYS[39]) is not None and exchange.header(KEYS[0]) is None
            assert len(list(exchange.root.rglob("*.kv"))) > 3 and not list(exchange.root.rglob("*.part"))


def test_a_disk_that_others_have_filled_is_an_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        exchange = DirectoryExchange(disk / "exchange")
        with filled(disk), pytest.raises(OSError, match="No space left"):
            put(exchange, 0)
        assert put(exchange, 0)


def _hammer(root: str, seed: int) -> None:
    torch.set_num_threads(1)
    exchange = DirectoryExchange(Path(root), max_bytes=30 * (LAYOUT.nbytes + 1024))
    for step in range(150):
        index = (seed * 7 + step * 13) % 64
        if step % 2:
            put(exchange, index)
        else:
            try:
                block = exchange.get(KEYS[index], model=MODEL, layout=LAYOUT)
            except BlockMissing:
                continue
            assert torch.equal(block.payload, payload(index))


def test_several_processes_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hammer, args=(str(tmp_path / "x"), seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert not list((tmp_path / "x").rglob("*.part"))
