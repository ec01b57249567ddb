"""What applying a mapper means, in plain torch: every other path is compared with this one.

For one target layer (arXiv 2608.03893, section 3.3): remove the source's rotation from the
keys, concatenate the selected layers, multiply, add the bias, apply the target's rotation; where the mapper
has the weights of the target's k_norm, keys go through it before that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub_kernels.normalise import normalise
from kvhub_kernels.rotary import RotaryTable, apply_rope, strip_rope
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Affine, Weights


def read(layer: Tensor, rows: Rows) -> Tensor:
    """The rows of one layer in order of tokens, `[tokens, heads, dim]`."""
    slots = rows.token_slots()
    return layer[: rows.tokens] if slots is None else layer[slots]


def map_layer_reference(
    weights: Weights,
    target_layer: int,
    source: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
    *,
    rounded: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys and values of one target layer, `[tokens, target_heads, target_dim]` float64.

    strip, rotate: the source's and the target's rotation at the rows' positions. rounded: the dtype
    that content keys and values are rounded to before the product, as the fast paths do.
    """
    layers = weights.plan.source_layers[target_layer]
    contents = [strip_rope(read(source.keys[layer], source).double(), strip) for layer in layers]
    values = [read(source.values[layer], source).double() for layer in layers]
    if rounded is not None:
        contents = [rows.to(rounded).double() for rows in contents]
        values = [rows.to(rounded).double() for rows in values]
    key, value = weights.sides[target_layer]
    content = _product(weights, key, contents)
    if weights.norms is not None:
        content = normalise(content, weights.norms[target_layer])
    return apply_rope(content, rotate), _product(weights, value, values)


def _product(weights: Weights, affine: Affine, rows: list[Tensor]) -> Tensor:
    plan, matrix = weights.plan, affine.dense()
    outputs = []
    for group in range(plan.groups):
        seen = [row if plan.support == "full" else row[:, group : group + 1] for row in rows]
        inputs = torch.cat([row.flatten(1) for row in seen], dim=1)
        outputs.append(inputs @ matrix[group] + affine.bias[group].double())
    return torch.cat(outputs, dim=1).view(-1, plan.target_heads, plan.target_dim)
