"""The kernels compile for real GPUs, and the machine code is what they were written for."""

from __future__ import annotations

import csv
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from kvhub_kernels import compiled, fused
from kvhub_kernels.compiled import (
    HEAD_DIM,
    Instruction,
    Resources,
    _spilled_in_loop,
    compile_affine,
    compile_gather,
    source_digest,
    variants,
    whole_heads,
)
from kvhub_kernels.tiles import ANY, TABLE, lanes_of

INSTRUCTION = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}


@pytest.mark.parametrize("capability", INSTRUCTION)
@pytest.mark.parametrize("support", ["full", "head-local"])
def test_long_prompts(capability, support, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = TABLE[90 if capability >= 90 else 80, support, ANY]
    found = compile_affine(support, tile, capability, int8=False, name=support)
    assert found.instructions == INSTRUCTION[capability]
    assert found.spilled_in_loop <= {("full", 90): 4, ("full", 100): 1}.get((support, capability), 0)
    # Operands of all stages but the one in use are in flight: the loads were pipelined.
    assert found.shared >= tile.shared(2) * (tile.stages - 1) // tile.stages
    assert found.shared <= 232448


def test_what_every_turn_of_the_inner_loop_pays():
    """Loads at its head count; the loop over tiles, and ways back from code that stands apart, do not."""
    code = "10 LDL|20 HGMMA|30 LDL.64|40 BRA 900|50 STL|60 HGMMA|70 LDL|80 BRA 30|90 STL|a0 BRA 10"
    code += "|900 LDL|910 BRA 50"
    lines = [line.split() for line in code.split("|")]
    made = [Instruction(int(a, 16), name, int(to[0], 16) if to else None) for a, name, *to in lines]
    assert _spilled_in_loop(made) == 3
    assert _spilled_in_loop([one for one in made if not one.is_product]) == 0


def test_gather(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compile_gather(90)
    assert found.spills == 0 and found.registers <= 64 and found.instructions == ""


def test_int8(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compile_affine("full", TABLE[90, "full", ANY], 90, int8=True, name="int8")
    assert found.instructions == "HGMMA"


@pytest.mark.parametrize("support", ["full", "head-local"])
def test_normalised(support, tmp_path, monkeypatch):
    """The sums of squares are taken from the accumulators: nothing of it is among the products."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tile = TABLE[90, support, ANY]
    found = compile_affine(support, tile, 90, int8=False, name=support, norm=True)
    assert found.instructions == "HGMMA" and found.spilled_in_loop == 0
    assert found.shared >= tile.shared(2) * (tile.stages - 1) // tile.stages


def test_a_tile_that_normalises_holds_whole_heads(tmp_path, monkeypatch):
    """One of the table's is narrower than a head: it is widened, as when it is used."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for known, support, most in TABLE:
        assert whole_heads(support, most, known).pairs >= lanes_of(HEAD_DIM)
    assert TABLE[80, "full", 64].pairs < lanes_of(HEAD_DIM)
    tile = whole_heads("full", 64, 80)
    found = compile_affine("full", tile, 80, int8=False, name="narrow", norm=True)
    assert found.instructions == "HMMA" and found.spilled_in_loop == 0


def test_the_report_is_of_what_is_shipped():
    """`python -m benchmarks.compiled` makes it; kernels or tiles that have changed since show here."""
    file = Path(__file__).parents[2] / "benchmarks/results/compiled.csv"
    header, *rows = list(csv.reader(file.read_text().splitlines()))
    assert header == [field.name for field in fields(Resources)]
    named = [(kernel, name, int(capability)) for kernel, name, capability, *_ in rows]
    assert named == [variant[:3] for variant in variants()]
    assert {row[-1] for row in rows} == {source_digest()}


def changed(monkeypatch, module, before, after):
    """The digest where `before` stands as `after` in the source of `module`."""
    given = inspect.getsource

    def getsource(what):
        text = given(what)
        return text.replace(before, after) if what is module else text

    assert before in given(module)
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getsource", getsource)
        return source_digest.__wrapped__()


@pytest.mark.parametrize(
    "before, after",
    [
        ("acc1 * cos - acc2 * sin", "acc1 * cos + acc2 * sin"),
        ("return token.to(tl.int64)", "return token"),
        ("def _by_head(values, TOKENS: tl.constexpr", "def _by_head(values, TOKENS: int"),
    ],
)
def test_a_changed_kernel_has_another_digest(before, after, monkeypatch):
    assert changed(monkeypatch, fused, before, after) != source_digest()


def test_comments_docstrings_and_layout_are_no_change(monkeypatch):
    found = changed(monkeypatch, fused, "# In registers:", "# in registers -")
    assert found == changed(monkeypatch, fused, "The two Triton kernels", "Both kernels") == source_digest()


def test_a_changed_table_or_constant_has_another_digest(monkeypatch):
    known = source_digest()
    for where, name, value in (
        (compiled, "TABLE", TABLE | {(80, "full", 16): TABLE[80, "full", 64]}),
        (fused, "EPSILON", 1e-5),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert source_digest.__wrapped__() != known
