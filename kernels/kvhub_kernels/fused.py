"""The two Triton kernels: gather with the source's rotation removed, and the grouped product.

The rotation of a source row is removed once, not once for each of the k target layers and every
column tile that reads it; it costs one pass over the source rows and leaves the product plain
operands. Both handle every layer and both sides in one launch. `docs/kernels.md` has the layout.
"""

# Triton's own spelling: compile-time constants in capitals; a kernel's arguments have no Python types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kvhub_kernels.normalise import EPSILON

_EPSILON = tl.constexpr(EPSILON)


@triton.jit
def _pair(j, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions of pair j of a head; pairs from HALF on are not rotated."""
    if INTERLEAVED:
        return 2 * j, 2 * j + 1
    inside = j < HALF
    first = tl.where(inside, j, HALF + j)
    return first, first + tl.where(inside, HALF, HEAD_DIM // 2 - HALF)


@triton.jit
def _by_head(values, TOKENS: tl.constexpr, HEADS: tl.constexpr, LANES: tl.constexpr):
    """Sums over each head's LANES columns, in every one of them: `[TOKENS, HEADS * LANES]`."""
    if HEADS == 1:
        return tl.broadcast_to(tl.sum(values, axis=1)[:, None], (TOKENS, LANES))
    total = tl.sum(tl.reshape(values, (TOKENS, HEADS, LANES)), axis=2)[:, :, None]
    return tl.reshape(tl.broadcast_to(total, (TOKENS, HEADS, LANES)), (TOKENS, HEADS * LANES))


@triton.jit
def _slot(slots_ptr, token, mask, PAGE: tl.constexpr):
    """Where a token lies, int64: pages of PAGE slots in a table, or in order (PAGE = 0)."""
    if PAGE == 0:
        return token.to(tl.int64)
    page = tl.load(slots_ptr + token // PAGE, mask=mask, other=0)
    return page * PAGE + token % PAGE


@triton.jit
def gather_kernel(
    rows_ptr,  # int64 [source layers, 2]: addresses of the layers' keys and values
    slots_ptr,  # int64 [pages]
    cos_ptr,  # float32 [all tokens, HALF]
    sin_ptr,
    used_ptr,  # int32 [used]: source layers
    x_ptr,  # [2, used, capacity, HEADS * HEAD_DIM]
    start,
    tokens,
    used,
    capacity,
    stride,  # elements from slot to slot
    factor,  # 1 / scale^2
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """Token block, block of pairs over all heads, (used layer, side): one program."""
    row = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    pair = tl.program_id(1) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
    index, side = tl.program_id(2) // 2, tl.program_id(2) % 2
    row_inside = row < tokens
    inside = row_inside[:, None] & (pair < HEADS * (HEAD_DIM // 2))[None, :]
    token = start + row
    layer = tl.load(used_ptr + index)
    base = tl.load(rows_ptr + layer * 2 + side).to(tl.pointer_type(ROWS))
    base = tl.multiple_of(base, 16)
    slot = _slot(slots_ptr, token, row_inside, PAGE)
    j = pair % (HEAD_DIM // 2)
    first, second = _pair(j, HEAD_DIM, HALF, INTERLEAVED)
    head = (pair // (HEAD_DIM // 2)) * HEAD_DIM
    source = base + (slot * stride)[:, None]
    a = tl.load(source + (head + first)[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + (head + second)[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = inside & (j < tl.where(side == 0, HALF, 0))[None, :]
    angle = token.to(tl.int64)[:, None] * HALF + j[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=0.0) * factor
    cos = tl.where(turned, cos, 1.0)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0) * factor
    out = x_ptr + ((side * used + index).to(tl.int64) * capacity + row)[:, None] * (HEADS * HEAD_DIM)
    dtype = x_ptr.dtype.element_ty
    tl.store(out + (head + first)[None, :], (a * cos + b * sin).to(dtype), mask=inside)
    tl.store(out + (head + second)[None, :], (b * cos - a * sin).to(dtype), mask=inside)


@triton.jit
def affine_kernel(
    x_ptr,  # [2, used, capacity, GROUPS * WIDTH]
    weight_ptr,  # [target layers, 2, GROUPS, 2, DEPTH, PAIRS]: first and second of every pair of columns
    bias_ptr,  # float32 [target layers, 2, GROUPS, 2, PAIRS]
    scale_ptr,  # the same, for int8 weights
    norm_ptr,  # float32 [target layers, 2, HEAD_DIM / 2]: of the target's k_norm, first and second of pairs
    cos_ptr,  # float32 [all tokens, HALF]
    sin_ptr,
    places_ptr,  # int32 [target layers, K]: which used layer
    words_ptr,  # int64 [target layers, 4]: the same for K <= 32, a byte each, lowest first
    layers_ptr,  # int32 [count]: target layers to map
    pool_ptr,  # int64 [target layers, 2]: addresses of the layers' keys and values
    slots_ptr,  # int64 [pages]
    finite_ptr,  # int32 [1]: set to 0 when a value is not finite
    start,
    tokens,
    count,
    used,
    capacity,
    stride,  # elements from slot to slot of the pool
    POOL: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    INT8: tl.constexpr,
    NORM: tl.constexpr,  # whether keys go through k_norm
    LANES: tl.constexpr,  # pairs of a head, up to a power of two, in a tile's columns; only for NORM
    WIDE: tl.constexpr,  # multiply in float32: the interpreter's product does not know bfloat16
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """A persistent loop over (target layer, side, group, column tile, token tile).

    Token tiles run fastest: the programs that run together read one weight tile.
    """
    DEPTH: tl.constexpr = K * WIDTH
    STEPS: tl.constexpr = (WIDTH + BLOCK_DEPTH - 1) // BLOCK_DEPTH
    HEAD_PAIRS: tl.constexpr = HEAD_DIM // 2
    # A norm needs whole heads in a tile: where a head is no power of two, some columns stay empty.
    PADDED: tl.constexpr = NORM and LANES != HEAD_PAIRS
    TILE_HEADS: tl.constexpr = BLOCK_PAIRS // LANES
    TILE_PAIRS: tl.constexpr = TILE_HEADS * HEAD_PAIRS if PADDED else BLOCK_PAIRS
    COLUMN_TILES: tl.constexpr = (PAIRS + TILE_PAIRS - 1) // TILE_PAIRS
    # An even tile needs no mask on its depth or its columns, so that loads stay asynchronous and wide.
    EVEN: tl.constexpr = WIDTH % BLOCK_DEPTH == 0 and PAIRS % BLOCK_PAIRS == 0 and not PADDED
    token_tiles = tl.cdiv(tokens, BLOCK_TOKENS)
    per_group = token_tiles * COLUMN_TILES
    for tile in tl.range(tl.program_id(0), count * 2 * GROUPS * per_group, tl.num_programs(0)):
        group_index, rest = tile // per_group, tile % per_group
        row = (rest % token_tiles) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        lane = tl.arange(0, BLOCK_PAIRS)
        if PADDED:
            pair = ((rest // token_tiles) * TILE_HEADS + lane // LANES) * HEAD_PAIRS + lane % LANES
            pair_inside = (lane % LANES < HEAD_PAIRS) & (pair < PAIRS)
        else:
            pair = (rest // token_tiles) * BLOCK_PAIRS + lane
            pair_inside = pair < PAIRS
        group, side = group_index % GROUPS, (group_index // GROUPS) % 2
        layer = tl.load(layers_ptr + group_index // (2 * GROUPS))
        row_inside = row < tokens
        deep = tl.arange(0, BLOCK_DEPTH)
        # In registers: a load in the loop would have to be waited for before the operands' addresses.
        word0, word1 = tl.load(words_ptr + layer * 4), tl.load(words_ptr + layer * 4 + 1)
        word2, word3 = tl.load(words_ptr + layer * 4 + 2), tl.load(words_ptr + layer * 4 + 3)

        matrix = ((layer * 2 + side) * GROUPS + group).to(tl.int64)
        weights = weight_ptr + matrix * (2 * DEPTH * PAIRS) + pair[None, :]
        # Rows beyond the last token are read from the scratch and thrown away at the store.
        inputs = x_ptr + row.to(tl.int64)[:, None] * (GROUPS * WIDTH) + group * WIDTH
        plane = capacity.to(tl.int64) * (GROUPS * WIDTH)
        acc1 = tl.zeros((BLOCK_TOKENS, BLOCK_PAIRS), tl.float32)
        acc2 = tl.zeros((BLOCK_TOKENS, BLOCK_PAIRS), tl.float32)
        for step in range(K * STEPS):
            i, inner = step // STEPS, (step % STEPS) * BLOCK_DEPTH + deep
            if WORDS:
                low, high = tl.where(i < 8, word0, word1), tl.where(i < 24, word2, word3)
                place = (tl.where(i < 16, low, high) >> (8 * (i % 8))) & 255
            else:
                place = tl.load(places_ptr + layer * K + i)
            x = inputs + (side * used + place) * plane + inner[None, :]
            w = weights + (i * WIDTH + inner)[:, None] * PAIRS
            if EVEN:
                a = tl.load(x)
                w1, w2 = tl.load(w), tl.load(w + DEPTH * PAIRS)
            else:
                a = tl.load(x, mask=(inner < WIDTH)[None, :], other=0.0)
                keep = (inner < WIDTH)[:, None] & pair_inside[None, :]
                w1 = tl.load(w, mask=keep, other=0)
                w2 = tl.load(w + DEPTH * PAIRS, mask=keep, other=0)
            if WIDE:
                a, w1, w2 = a.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32)
            elif INT8:
                w1, w2 = w1.to(a.dtype), w2.to(a.dtype)
            acc1 = tl.dot(a, w1, acc1, input_precision="ieee")
            acc2 = tl.dot(a, w2, acc2, input_precision="ieee")

        column = matrix * (2 * PAIRS) + pair
        if INT8:
            acc1 *= tl.load(scale_ptr + column, mask=pair_inside, other=0.0)[None, :]
            acc2 *= tl.load(scale_ptr + column + PAIRS, mask=pair_inside, other=0.0)[None, :]
        acc1 += tl.load(bias_ptr + column, mask=pair_inside, other=0.0)[None, :]
        acc2 += tl.load(bias_ptr + column + PAIRS, mask=pair_inside, other=0.0)[None, :]

        j = pair % HEAD_PAIRS
        if NORM:
            total = _by_head(acc1 * acc1 + acc2 * acc2, BLOCK_TOKENS, TILE_HEADS, LANES)
            size = tl.where(side == 0, tl.rsqrt(total / HEAD_DIM + _EPSILON), 1.0)
            norm = norm_ptr + layer * HEAD_DIM + j
            key = pair_inside & (j < tl.where(side == 0, HEAD_PAIRS, 0))
            acc1 *= size * tl.load(norm, mask=key, other=1.0)[None, :]
            acc2 *= size * tl.load(norm + HEAD_PAIRS, mask=key, other=1.0)[None, :]

        token = start + row
        inside = row_inside[:, None] & pair_inside[None, :]
        turned = inside & (j < tl.where(side == 0, HALF, 0))[None, :]
        angle = token.to(tl.int64)[:, None] * HALF + j[None, :]
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0)
        out1 = (acc1 * cos - acc2 * sin).to(POOL)
        out2 = (acc2 * cos + acc1 * sin).to(POOL)

        base = tl.multiple_of(tl.load(pool_ptr + layer * 2 + side).to(tl.pointer_type(POOL)), 16)
        slot = _slot(slots_ptr, token, row_inside, PAGE)
        first, second = _pair(j, HEAD_DIM, HALF, INTERLEAVED)
        head = (group * (PAIRS // HEAD_PAIRS) + pair // HEAD_PAIRS) * HEAD_DIM
        target = base + (slot * stride)[:, None] + head[None, :]
        tl.store(target + first[None, :], out1, mask=inside)
        tl.store(target + second[None, :], out2, mask=inside)
        # As stored: what overflows a narrow pool is not finite either. NaN fails every comparison.
        fine = (tl.abs(out1.to(tl.float32)) < float("inf")) & (tl.abs(out2.to(tl.float32)) < float("inf"))
        if tl.sum(tl.where(inside & ~fine, 1, 0)) > 0:
            tl.store(finite_ptr, 0)
