"""Compile the kernels ahead of time, without a GPU, and read what they need from the cubin."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvhub_kernels import fused
from kvhub_kernels.fused import affine_kernel, gather_kernel
from kvhub_kernels.tiles import ANY, MOST_SUMS, TABLE, Tile, choose, lanes_of

CAPABILITIES = (80, 90, 100)
SHARED = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a program may have."""
HEADS, HEAD_DIM = 8, 128
"""Of both sides."""


@dataclass(frozen=True)
class Resources:
    """Of one kernel on one GPU generation, as the assembler reports them. Bytes, but for registers."""

    kernel: str
    variant: str
    capability: int
    registers: int
    shared: int
    """Static and dynamic, a program."""
    spills: int
    """Local memory a thread: spilled registers and stack."""
    spilled_in_loop: int
    """Accesses to it in a turn of the innermost loop around the products."""
    instructions: str
    """The matrix instructions found in the machine code."""
    source: str
    """`source_digest()` of what was compiled."""


class Variant(NamedTuple):
    """One kernel that `compile_all` compiles."""

    kernel: str
    name: str
    capability: int
    compile: Callable[[], Resources]


@lru_cache
def source_digest() -> str:
    """16 hex digits of the kernels' code, of what it imports and of the tiles, as compiled here.

    Comments, docstrings and layout do not change it.
    """
    whole = ast.parse(inspect.getsource(fused))
    parts = [ast.parse(inspect.getsource(part)) for part in (choose, lanes_of, whole_heads, compile_gather)]
    parts.append(ast.parse(inspect.getsource(compile_affine)))
    code = [ast.unparse(_without_docstrings(tree)) for tree in (whole, *parts)]
    values = [(name, value) for name, value in vars(fused).items() if isinstance(value, (int, float, str))]
    values = [(name, value) for name, value in values if name.isupper()]
    text = repr((code, sorted(values), sorted(TABLE.items()), MOST_SUMS, SHARED, HEADS, HEAD_DIM))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """`tree` less every expression that is only a text."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return tree


def variants(capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[Variant]:
    """The gather and every tile of the table, with and without int8 and k_norm, for each GPU generation.

    A tile that normalises keys is the one that `choose` makes of it: it holds whole heads.
    """
    for capability in capabilities:
        yield Variant("gather_kernel", "bfloat16", capability, partial(compile_gather, capability))
        known = 90 if capability >= 90 else 80
        for (least, support, most), tile in TABLE.items():
            for int8, norm in product((False, True), repeat=2) if least == known else ():
                long = "any" if most == ANY else f"<= {most}"
                name = f"{support}, {'int8' if int8 else 'bfloat16'}, tokens {long}" + ", k_norm" * norm
                used = whole_heads(support, most, capability) if norm else tile
                make = partial(compile_affine, support, used, capability, int8=int8, name=name, norm=norm)
                yield Variant("affine_kernel", name, capability, make)


def whole_heads(support: str, tokens: int, capability: int) -> Tile:
    """The tile for `tokens` rows of bfloat16 where keys are normalised."""
    width = HEADS * HEAD_DIM if support == "full" else HEAD_DIM
    return choose(
        support, tokens, width // 2, width,
        capability=capability, shared=SHARED[capability], itemsize=2, lanes=lanes_of(HEAD_DIM),
    )  # fmt: skip


def compile_all(capabilities: tuple[int, ...] = CAPABILITIES) -> Iterator[Resources]:
    """What each of `variants` needs."""
    return (variant.compile() for variant in variants(capabilities))


def compile_gather(capability: int) -> Resources:
    """The gather for 8 heads of 128."""
    return _compile(
        gather_kernel,
        "bfloat16",
        capability,
        signature="*i64 *i64 *fp32 *fp32 *i32 *bf16 i32 i32 i32 i32 i32 fp32",
        constants={
            "ROWS": triton.language.bfloat16,
            "HEADS": 8,
            "HEAD_DIM": 128,
            "HALF": 64,
            "INTERLEAVED": False,
            "PAGE": 1,
            "BLOCK_TOKENS": 16,
            "BLOCK_PAIRS": 64,
        },
        warps=4,
        stages=3,
    )


def compile_affine(
    support: str, tile: Tile, capability: int, *, int8: bool, name: str, norm: bool = False
) -> Resources:
    """The product for 8 heads of 128 on both sides and k = 8. norm: with the target's k_norm after it."""
    groups, width, pairs = (1, 1024, 512) if support == "full" else (8, 128, 64)
    weight = "*i8" if int8 else "*bf16"
    return _compile(
        affine_kernel,
        name,
        capability,
        signature=f"*bf16 {weight} {'*fp32 ' * 5}*i32 *i64 *i32 *i64 *i64 *i32 " + "i32 " * 6,
        constants={
            "POOL": triton.language.bfloat16,
            "GROUPS": groups,
            "K": 8,
            "WIDTH": width,
            "PAIRS": pairs,
            "HEAD_DIM": 128,
            "HALF": 64,
            "INTERLEAVED": False,
            "PAGE": 1,
            "WORDS": True,
            "INT8": int8,
            "NORM": norm,
            "LANES": 64,
            "WIDE": False,
            "BLOCK_TOKENS": tile.tokens,
            "BLOCK_PAIRS": min(tile.pairs, pairs),
            "BLOCK_DEPTH": min(tile.depth, width),
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _compile(
    kernel: triton.JITFunction,
    variant: str,
    capability: int,
    *,
    signature: str,
    constants: dict[str, object],
    warps: int,
    stages: int,
) -> Resources:
    names = [name for name in kernel.arg_names if name not in constants]
    types = dict(zip(names, signature.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    # At run time Triton specialises on addresses and strides that are multiples of 16; so here.
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind.startswith("*") or name in ("stride", "capacity")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, code = _inspect(built.asm["cubin"])
    return Resources(
        kernel=kernel.fn.__name__,
        variant=variant,
        capability=capability,
        registers=int(usage["REG"]),
        shared=int(usage["SHARED"]) + int(built.metadata.shared),
        spills=int(usage["LOCAL"]) + int(usage["STACK"]),
        spilled_in_loop=_spilled_in_loop(code),
        instructions=" ".join(sorted({one.name.split(".")[0] for one in code if one.is_product})),
        source=source_digest(),
    )


class Instruction(NamedTuple):
    """One line of machine code. target: the address that a branch goes to; None: no branch."""

    address: int
    name: str
    target: int | None

    @property
    def is_product(self) -> bool:
        return self.name.startswith(("HMMA", "HGMMA", "UTCHMMA"))


def _spilled_in_loop(code: Sequence[Instruction]) -> int:
    """Accesses to local memory in the innermost loops that hold products: what every turn pays.

    A loop is what a branch backwards spans, so that what comes before its first product is in it. Of those
    that overlap only the shortest counts: longer ones are the loop over tiles, around it, or ways back from
    code that waits for memory and stands apart.
    """
    back = [(one.target, one.address) for one in code if one.target is not None]
    products = [one.address for one in code if one.is_product]
    inner: list[tuple[int, int]] = []
    for first, last in sorted(back, key=lambda loop: loop[1] - loop[0]):
        holds = any(first <= at <= last for at in products)
        if first <= last and holds and all(last < a or b < first for a, b in inner):
            inner.append((first, last))
    local = (one.address for one in code if one.name.startswith(("LDL", "STL")))
    return sum(any(a <= at <= b for a, b in inner) for at in local)


def _inspect(cubin: bytes) -> tuple[dict[str, str], list[Instruction]]:
    """Resource usage, and the instructions in order."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def run(flag: str) -> str:
            return subprocess.run(
                [str(tool), flag, str(path)], capture_output=True, text=True, check=True
            ).stdout

        usage = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", run("-res-usage")))
        line = r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)([^;]*);"
        code = []
        for address, name, rest in re.findall(line, run("-sass")):
            target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
            code.append(Instruction(int(address, 16), name, int(target[1], 16) if target else None))
        return usage, code
