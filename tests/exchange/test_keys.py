"""Keys: equal only for equal prefixes in the same namespace."""

from __future__ import annotations

import hashlib
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvhub.exchange import BLOCK_TOKENS, Namespace, chain_keys
from kvhub.exchange.keys import length_prefixed

MODEL = "a" * 64
TOKENS = list(range(200))


def test_the_chain_is_the_documented_one() -> None:
    namespace = Namespace(MODEL, "exact", ("salt", "extra"))
    parts = [MODEL.encode(), b"exact", b"salt", b"extra"]
    seed = hashlib.sha256(
        b"kvhub-exchange-1" + b"".join(len(p).to_bytes(8, "little") + p for p in parts)
    ).digest()
    first = hashlib.sha256(seed + np.arange(64, dtype="<i8").tobytes()).digest()
    second = hashlib.sha256(first + np.arange(64, 128, dtype="<i8").tobytes()).digest()
    assert chain_keys(namespace, TOKENS)[:2] == [first, second]


def test_only_full_blocks_have_keys_and_arrays_are_as_good_as_lists() -> None:
    namespace = Namespace(MODEL, "exact")
    assert len(chain_keys(namespace, TOKENS)) == 3 and chain_keys(namespace, TOKENS[:63]) == []
    assert chain_keys(namespace, array("q", TOKENS)) == chain_keys(namespace, TOKENS)
    assert chain_keys(namespace, TOKENS, blocks=2) == chain_keys(namespace, TOKENS)[:2]


@given(st.integers(0, 191), st.integers(0, 1000))
def test_a_changed_token_changes_its_block_and_all_after(index: int, token: int) -> None:
    namespace = Namespace(MODEL, "exact")
    changed = [*TOKENS]
    changed[index] = token
    before, after = chain_keys(namespace, TOKENS), chain_keys(namespace, changed)
    block = index // BLOCK_TOKENS
    assert before[:block] == after[:block]
    for old, new in zip(before[block:], after[block:], strict=True):
        assert (old == new) == (token == TOKENS[index])


def test_namespaces_never_meet() -> None:
    namespaces = [
        Namespace(model, kind, tenant)  # type: ignore[arg-type]
        for model in (MODEL, "b" * 64)
        for kind in ("exact", "lossy")
        for tenant in (("", ""), ("t", ""), ("", "t"), ("tt", ""), ("exact", ""), ("t", "t"))
    ]
    firsts = {chain_keys(namespace, TOKENS)[0] for namespace in namespaces}
    assert len(firsts) == len(namespaces)


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_joined_parts_are_unambiguous(one: list[bytes], other: list[bytes]) -> None:
    assert (length_prefixed(*one) == length_prefixed(*other)) == (one == other)
