"""The exchange on a real Mooncake store; without its client these tests are skipped."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mooncake

from kvhub.errors import AccessDenied, BadInput, NotFound, Unreachable
from kvhub.exchange import BlockCorrupt, BlockMissing, Layout, Lineage, Namespace, chain_keys
from kvhub.exchange.block import encode
from kvhub.exchange.mooncake_url import MooncakeAddress
from kvhub.exchange.signature import sign

MODEL = "a" * 64
LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
EXACT = Lineage(hops=0, mappers=[])
SECRET = bytes(range(40))


def payload(seed: int, layout: Layout = LAYOUT) -> torch.Tensor:
    rows = torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed))
    return rows.to(getattr(torch, layout.dtype))


def keys(seed: int, count: int = 1) -> list[bytes]:
    return chain_keys(Namespace(MODEL, "exact"), [seed] * 64 * count)


def put(exchange: Any, key: bytes, seed: int = 1, lineage: Lineage = EXACT) -> bool:
    return bool(
        exchange.put(key, model=MODEL, position=0, layout=LAYOUT, lineage=lineage, payload=payload(seed))
    )


class TestAddress:
    def test_every_part_of_a_url(self) -> None:
        address = MooncakeAddress.parse(
            "mooncake://10.1.2.3:50051?metadata=http://10.1.2.3:8080/metadata&local=10.1.2.4"
            "&protocol=rdma&device=mlx5_0&segment=4GiB&buffer=32MiB&secret=/run/key"
        )
        assert address == MooncakeAddress(
            "10.1.2.3", 50051, "http://10.1.2.3:8080/metadata", "10.1.2.4", "rdma", "mlx5_0",
            4 << 30, 32 << 20, "/run/key",
        )  # fmt: skip

    def test_this_machines_address_is_the_one_that_reaches_the_master(self) -> None:
        assert MooncakeAddress.parse("mooncake://127.0.0.1:1").local_host() == "127.0.0.1"

    @pytest.mark.parametrize(
        "url",
        [
            "mooncake://host",
            "mooncake://:50051",
            "mooncake://host:port",
            "mooncake://host:99999",
            "mooncake://host:1/path",
            "mooncake://user@host:1",
            "mooncake://host:1?segment=much",
            "mooncake://host:1?segment=-1",
            "mooncake://host:1?size=1",
            "mooncake://host:1?local=a&local=b",
            "mooncake://host:1?local",
            "other://host:1",
        ],
    )
    def test_a_bad_one_is_refused(self, url: str) -> None:
        with pytest.raises(BadInput):
            MooncakeAddress.parse(url)

    def test_the_secret_must_be_private_and_long_enough(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        address = MooncakeAddress.parse(f"mooncake://host:1?secret={file}")
        with pytest.raises(NotFound):
            address.read_secret()
        file.touch(mode=0o600)
        file.write_bytes(SECRET)
        assert address.read_secret() == SECRET
        file.write_bytes(SECRET[:31])
        with pytest.raises(BadInput):
            address.read_secret()
        file.write_bytes(SECRET)
        file.chmod(0o640)
        with pytest.raises(AccessDenied):
            address.read_secret()


needs_mooncake = pytest.mark.skipif(mooncake.missing() is not None, reason=str(mooncake.missing()))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mooncake.Store]:
    with mooncake.store(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@pytest.fixture(scope="module")
def secret_url(store: mooncake.Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.touch(mode=0o600)
    file.write_bytes(SECRET)
    return f"{store.url}?secret={file}"


@pytest.fixture(scope="module")
def exchange(store: mooncake.Store) -> Any:
    from kvhub.exchange.mooncake import open_mooncake

    return open_mooncake(store.url)


@pytest.fixture(scope="module")
def signed(secret_url: str) -> Any:
    from kvhub.exchange.mooncake import open_mooncake

    return open_mooncake(secret_url)


@needs_mooncake
class TestStore:
    @pytest.mark.parametrize("which", ["exchange", "signed"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_a_block_comes_back_to_the_bit(
        self, request: pytest.FixtureRequest, which: str, dtype: str
    ) -> None:
        exchange = request.getfixturevalue(which)
        layout = LAYOUT.model_copy(update={"dtype": dtype})
        key, lineage = keys(hash((which, dtype)) % 10**6)[0], Lineage(hops=2, mappers=["c" * 64])
        rows = payload(3, layout)
        assert exchange.put(key, model=MODEL, position=0, layout=layout, lineage=lineage, payload=rows)
        block = exchange.get(key, model=MODEL, layout=layout)
        assert torch.equal(block.payload, rows) and block.header.lineage == lineage
        assert exchange.header(key) == block.header

    def test_another_process_of_the_store_reads_it(self, exchange: Any, store: mooncake.Store) -> None:
        from kvhub.exchange.mooncake import open_mooncake

        [key] = keys(11)
        put(exchange, key)
        other = open_mooncake(store.url)
        assert torch.equal(other.get(key, model=MODEL, layout=LAYOUT).payload, payload(1))
        other.close()

    def test_a_missing_block_is_missing(self, exchange: Any) -> None:
        [key] = keys(12)
        assert exchange.header(key) is None
        with pytest.raises(BlockMissing):
            exchange.get(key, model=MODEL, layout=LAYOUT)

    def test_several_headers_at_once(self, exchange: Any) -> None:
        wanted = keys(13, 5)
        for index in (0, 1, 3):
            put(exchange, wanted[index])
        found = exchange.headers(wanted)
        assert [header is not None for header in found] == [True, True, False, True, False]
        assert all(h is None or h.key == k.hex() for h, k in zip(found, wanted, strict=True))

    def test_fewer_hops_replace_more_and_never_the_other_way(self, exchange: Any) -> None:
        [key] = keys(14)
        two, one = Lineage(hops=2, mappers=["c" * 64]), Lineage(hops=1, mappers=["c" * 64])
        assert put(exchange, key, 1, two) and put(exchange, key, 2, one)
        assert not put(exchange, key, 1, two) and not put(exchange, key, 1, one)
        assert exchange.header(key).lineage.hops == 1
        assert torch.equal(exchange.get(key, model=MODEL, layout=LAYOUT).payload, payload(2))

    def test_a_lineage_that_does_not_fit_the_first_read(self, exchange: Any, signed: Any) -> None:
        for one, seed in ((exchange, 15), (signed, 16)):
            [key] = keys(seed)
            long = Lineage(hops=3, mappers=[f"{i:064x}" for i in range(200)])
            assert put(one, key, 1, long)
            assert one.header(key).lineage == long
            assert one.get(key, model=MODEL, layout=LAYOUT).header.lineage == long

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-1],
            lambda data: data + b"\0",
            lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
            lambda data: data[:11],
            lambda data: data[:700],
            lambda data: b"X" + data[1:],
            lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:],
            lambda data: data.replace(b'"hops":0', b'"hops":1'),
            lambda data: data.replace(MODEL.encode(), b"d" * 64),
            lambda data: data + b"\0" * (1 << 20),
        ],
    )
    def test_a_hostile_page_is_refused_and_removed(
        self, exchange: Any, damage: Callable[[bytes], bytes]
    ) -> None:
        [key] = keys(20)
        page = damage(encode(key, MODEL, 0, LAYOUT, EXACT, payload(1)))
        assert exchange._client.upsert(f"kvhub:{key.hex()}", page) == 0
        exchange.header(key)  # whatever it says, it does not raise
        with pytest.raises(BlockCorrupt):
            exchange.get(key, model=MODEL, layout=LAYOUT)
        with pytest.raises(BlockMissing):
            exchange.get(key, model=MODEL, layout=LAYOUT)

    def test_a_block_under_another_key_is_refused(self, exchange: Any) -> None:
        mine, other = keys(21)[0], keys(22)[0]
        page = encode(other, MODEL, 0, LAYOUT, EXACT, payload(1))
        exchange._client.upsert(f"kvhub:{mine.hex()}", page)
        assert exchange.header(mine) is None
        with pytest.raises(BlockCorrupt):
            exchange.get(mine, model=MODEL, layout=LAYOUT)

    def test_a_damaged_page_is_replaced_by_the_next_put(self, exchange: Any) -> None:
        [key] = keys(23)
        exchange._client.upsert(f"kvhub:{key.hex()}", b"rubbish" * 300)
        assert put(exchange, key)
        assert torch.equal(exchange.get(key, model=MODEL, layout=LAYOUT).payload, payload(1))

    def test_with_a_secret_only_signed_blocks_are_believed(self, exchange: Any, signed: Any) -> None:
        unsigned, forged, good = keys(24)[0], keys(25)[0], keys(26)[0]
        put(exchange, unsigned)
        block = encode(forged, MODEL, 0, LAYOUT, EXACT, payload(1))
        exchange._client.upsert(f"kvhub:{forged.hex()}", sign(block, b"another secret" * 4))
        put(signed, good)
        assert signed.headers([unsigned, forged, good])[:2] == [None, None]
        for key in (unsigned, forged):
            with pytest.raises(BlockCorrupt, match="signed"):
                signed.get(key, model=MODEL, layout=LAYOUT)
        assert torch.equal(signed.get(good, model=MODEL, layout=LAYOUT).payload, payload(1))
        # a payload exchanged under a good signature does not fit the signed checksum
        page = exchange._client.get(f"kvhub:{good.hex()}")
        exchange._client.upsert(f"kvhub:{good.hex()}", page[:-1] + bytes([page[-1] ^ 1]))
        with pytest.raises(BlockCorrupt, match="checksum"):
            signed.get(good, model=MODEL, layout=LAYOUT)

    def test_several_threads_at_once(self, exchange: Any) -> None:
        wanted = keys(27, 24)
        wrong: list[str] = []

        def work(seed: int) -> None:
            for step in range(48):
                index = (seed * 7 + step * 5) % 24
                if step % 2:
                    put(exchange, wanted[index], index)
                else:
                    try:
                        block = exchange.get(wanted[index], model=MODEL, layout=LAYOUT)
                    except BlockMissing:
                        continue
                    if not torch.equal(block.payload, payload(index)):
                        wrong.append(f"block {index}")

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_full_store_is_an_error_and_recovers(self, exchange: Any) -> None:
        layout = Layout(num_layers=16, num_kv_heads=8, head_dim=64, dtype="float32")  # 4 MiB a block
        wanted, rows = keys(28, 24), payload(1, layout)
        refused = 0
        for key in wanted:
            try:
                exchange.put(key, model=MODEL, position=0, layout=layout, lineage=EXACT, payload=rows)
            except OSError as error:
                assert error.errno == errno.ENOSPC
                refused += 1
        assert refused  # 96 MiB into 48
        deadline = time.monotonic() + 10
        while True:  # the leases of half a second run out, Mooncake evicts
            try:
                assert put(exchange, os.urandom(32))
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.2)


@needs_mooncake
def test_a_master_that_is_gone_is_an_os_error(tmp_path: Path) -> None:
    from kvhub.exchange.mooncake import open_mooncake

    with mooncake.store(tmp_path) as store:
        exchange = open_mooncake(store.url)
        [key] = keys(31)
        put(exchange, key)
        store.master.kill()
        store.master.wait()
        with pytest.raises(OSError):
            exchange.header(key)


@needs_mooncake
def test_no_master_at_start_is_said_with_a_hint() -> None:
    from support.server import free_port

    from kvhub.exchange.mooncake import open_mooncake

    with pytest.raises(Unreachable, match="no Mooncake master") as error:
        open_mooncake(f"mooncake://127.0.0.1:{free_port()}")
    assert "mooncake_master" in error.value.hint


@pytest.mark.skipif(mooncake.missing() is None, reason="Mooncake's client is installed")
def test_without_the_client_the_hint_says_what_to_install() -> None:
    from kvhub.exchange.mooncake import open_mooncake

    with pytest.raises(NotFound) as error:
        open_mooncake("mooncake://127.0.0.1:1")
    assert "kvhub[mooncake]" in error.value.hint
