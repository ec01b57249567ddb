"""All diagnostics of one mapped window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvhub.diagnostics.attention import attention_weights
from kvhub.diagnostics.key_concentration import key_error_concentration
from kvhub.diagnostics.observe import Observation
from kvhub.diagnostics.output_error import output_error
from kvhub.diagnostics.positions import position_errors
from kvhub.diagnostics.value_concentration import value_error_concentration
from kvhub.evaluation.inject import KvRows
from kvhub.evaluation.metrics import Array, attention_cosine
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import strip_rope


@dataclass(frozen=True)
class WindowDiagnosis:
    """Arrays by target layer (first axis), float64."""

    cosine: Array
    """Attention-output cosine, `[layers, heads]`."""
    key_concentration: Array
    value_concentration: Array
    attention_kl: Array
    output_error: Array
    """`[layers, heads]`, as the three above; see each one's file."""
    residual_error: Array
    """`[layers]`."""
    key_errors: Array
    """Content keys by position, `[layers, tokens]`: squared error over the layer's spread in this window."""
    value_errors: Array


def diagnose_window(seen: Observation, mapped: KvRows, *, exact_prefix: int = 0) -> WindowDiagnosis:
    """mapped: the target's prefix rows by a mapper; the first `exact_prefix` are replaced by native ones."""
    prefix = seen.prefix
    served = mapped.with_exact_prefix(prefix, exact_prefix)
    table = rotary_table(seen.rope, torch.arange(seen.split, device=prefix.keys[0].device))
    found: dict[str, list[Tensor]] = {name: [] for name in WindowDiagnosis.__dataclass_fields__}
    with torch.inference_mode():
        for layer, (query, scaling) in enumerate(zip(seen.queries, seen.scaling, strict=True)):
            native = prefix.keys[layer], prefix.values[layer]
            rows = served.keys[layer], served.values[layer]
            weights = attention_weights(query, native[0], scaling)
            whole = seen.native.keys[layer], seen.native.values[layer]
            moved = output_error(query, scaling, whole, rows, seen.outputs[layer], seen.residual[layer])
            content = [strip_rope(key.float(), table) for key in (native[0], rows[0])]
            found["cosine"].append(torch.from_numpy(attention_cosine(query, scaling, native, rows)))
            found["key_concentration"].append(key_error_concentration(query, native[0], rows[0]))
            found["value_concentration"].append(value_error_concentration(weights, native[1], rows[1]))
            found["attention_kl"].append(moved.attention_kl)
            found["output_error"].append(moved.output)
            found["residual_error"].append(moved.residual)
            for name, pair in (("key_errors", content), ("value_errors", [native[1], rows[1]])):
                by_position = position_errors(*pair)
                spread = by_position.spread.clamp_min(torch.finfo(torch.float32).tiny)
                found[name].append(by_position.errors / spread)
    return WindowDiagnosis(**{name: _stack(parts) for name, parts in found.items()})


def _stack(parts: list[Tensor]) -> Array:
    stacked: Array = np.stack([part.double().cpu().numpy() for part in parts])
    return stacked
