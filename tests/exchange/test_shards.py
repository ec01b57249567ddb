"""Pieces of blocks: every degree writes what every other degree reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvhub.exchange import (
    BlockHeader,
    BlockMissing,
    DirectoryExchange,
    Layout,
    Lineage,
    Namespace,
    chain_keys,
)
from kvhub.exchange.shards import HeadSlice, ShardedExchange, piece_key

MODEL = "a" * 64
EXACT = Lineage(hops=0, mappers=[])
LOSSY = Lineage(hops=1, mappers=["c" * 64])
KEY = chain_keys(Namespace(MODEL, "exact"), list(range(64)))[0]
HEADS = 4
ROWS = torch.randn(3, 2, 64, HEADS, 8, generator=torch.Generator().manual_seed(1))


def layout(heads: int) -> Layout:
    return Layout(num_layers=3, num_kv_heads=heads, head_dim=8, dtype="float32")


def ranks(root: Path, size: int, total: int = HEADS) -> list[ShardedExchange]:
    """The exchange as each rank of a server of degree `size` sees it."""
    found = []
    for rank in range(size):
        mine = HeadSlice.of_rank(rank, size, total)
        first = all(HeadSlice.of_rank(r, size, total) != mine for r in range(rank))
        found.append(ShardedExchange(DirectoryExchange(root), {MODEL: mine}, mine, publishes=first))
    return found


def put(rank: ShardedExchange, lineage: Lineage = EXACT, rows: torch.Tensor = ROWS) -> bool:
    mine = rank.mine
    return rank.put(
        KEY,
        model=MODEL,
        position=0,
        layout=layout(mine.count),
        lineage=lineage,
        payload=rows[:, :, :, mine.first : mine.first + mine.count],
    )


def get(rank: ShardedExchange) -> torch.Tensor:
    return rank.get(KEY, model=MODEL, layout=layout(rank.mine.count)).payload


@pytest.mark.parametrize("writers", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_any_degree_reads_what_any_other_wrote(tmp_path: Path, writers: int, readers: int) -> None:
    stored = [put(rank) for rank in ranks(tmp_path / "x", writers)]
    assert sum(stored) == min(writers, HEADS)  # replicated heads are published once
    for rank in ranks(tmp_path / "x", readers):
        mine = rank.mine
        assert torch.equal(get(rank), ROWS[:, :, :, mine.first : mine.first + mine.count])


def test_more_ranks_than_heads_hold_a_head_together() -> None:
    slices = [HeadSlice.of_rank(rank, 8, 2) for rank in range(8)]
    assert [s.first for s in slices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(s.count == 1 and s.parts == 2 for s in slices)


@pytest.mark.parametrize(("size", "total"), [(3, 4), (4, 6), (6, 4)])
def test_heads_that_do_not_divide_are_refused(size: int, total: int) -> None:
    with pytest.raises(ValueError):
        HeadSlice.of_rank(0, size, total)


def test_a_reader_may_need_all_heads_on_every_rank(tmp_path: Path) -> None:
    for rank in ranks(tmp_path / "x", 2):
        put(rank)
    mine = HeadSlice.of_rank(1, 2, HEADS)
    reader = ShardedExchange(
        DirectoryExchange(tmp_path / "x"), {MODEL: HeadSlice.everything(HEADS)}, mine, publishes=True
    )
    assert torch.equal(reader.get(KEY, model=MODEL, layout=layout(HEADS)).payload, ROWS)


def test_a_block_is_there_when_all_its_pieces_are(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "x", 2)
    whole = ranks(tmp_path / "x", 1)[0]
    put(first)
    assert whole.header(KEY) is None and first.header(KEY) is None
    with pytest.raises(BlockMissing):
        get(first)
    put(second)
    header = whole.header(KEY)
    assert header is not None and header.lineage == EXACT


class Asked(DirectoryExchange):
    """Notes how many headers were asked for in each call."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[int] = []

    def headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        self.asked.append(len(keys))
        return super().headers(keys)


def test_headers_of_many_blocks_cost_few_calls(tmp_path: Path) -> None:
    """Whole, in halves, one half alone, in quarters of two lineages, absent: as one by one."""
    keys = chain_keys(Namespace(MODEL, "exact"), list(range(64 * 20)))
    store = Asked(tmp_path / "x")

    def leave(key: bytes, parts: int, only: Sequence[int], lineages: Sequence[Lineage]) -> None:
        width = HEADS // parts
        for part, lineage in zip(only, lineages, strict=True):
            rows = ROWS[:, :, :, part * width : (part + 1) * width]
            name = piece_key(key, part, parts)
            store.put(name, model=MODEL, position=0, layout=layout(width), lineage=lineage, payload=rows)

    for index, key in enumerate(keys):
        kind = index % 5
        if kind == 0:
            leave(key, 1, [0], [EXACT])
        elif kind in (1, 2):
            leave(key, 2, range(kind), [LOSSY] * kind)
        elif kind == 3:
            leave(key, 4, range(4), [EXACT, EXACT, EXACT, LOSSY])
    everything = HeadSlice.everything(HEADS)
    reader = ShardedExchange(store, {MODEL: everything}, everything)
    found = reader.headers(keys)
    assert len(store.asked) <= 6 and max(store.asked) <= 3 * len(keys)
    assert found == [reader.header(key) for key in keys]
    hops = [None if header is None else header.lineage.hops for header in found]
    assert hops == [0, None, 1, None, None] * 4
    assert torch.equal(reader.get(keys[2], model=MODEL, layout=layout(HEADS)).payload, ROWS)


def test_a_whole_block_is_read_without_asking_for_its_header(tmp_path: Path) -> None:
    store = Asked(tmp_path / "x")
    everything = HeadSlice.everything(HEADS)
    reader = ShardedExchange(store, {MODEL: everything}, everything)
    put(reader)
    store.asked.clear()
    assert torch.equal(get(reader), ROWS) and store.asked == []


def test_pieces_of_different_lineage_are_no_block(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "x", 2)
    put(first, LOSSY)
    put(second, LOSSY.then("d" * 64))
    assert first.header(KEY) is None
    put(second, LOSSY)
    assert first.header(KEY) is not None


def test_a_damaged_piece_spoils_the_block_for_those_who_need_it(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "x", 2)
    put(first), put(second)
    name = piece_key(KEY, 1, 2).hex()
    [path] = (tmp_path / "x").rglob(f"{name}.kv")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert torch.equal(get(first), ROWS[:, :, :, :2])
    with pytest.raises(Exception, match="checksum"):
        get(second)


def test_a_piece_under_another_pieces_name_is_refused(tmp_path: Path) -> None:
    """The heads are named by the key, and the key is in the checked header."""
    first, second = ranks(tmp_path / "x", 2)
    put(first), put(second)
    zero, one = (next((tmp_path / "x").rglob(f"{piece_key(KEY, p, 2).hex()}.kv")) for p in (0, 1))
    one.write_bytes(zero.read_bytes())
    assert first.header(KEY) is None
    with pytest.raises(BlockMissing):
        get(second)


def test_keys_of_pieces_differ_by_part_and_split() -> None:
    keys = [piece_key(KEY, part, parts) for parts in (1, 2, 4) for part in range(parts)]
    assert len(set(keys)) == 7 and keys[0] == KEY
