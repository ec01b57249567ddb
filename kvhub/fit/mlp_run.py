"""Fit the `mlp` family: one target layer after the other, rows from the captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvhub.artifact.manifest import Perceptron, Training
from kvhub.artifact.tensors import MLP_PARTS
from kvhub.errors import KvhubError
from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import row_positions
from kvhub.fit.mlp import MlpSettings, train_networks
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved
from kvhub.mapper.mlp import grouped
from kvhub.model.identity import within_bounds
from kvhub_kernels.mlp import Dense, apply_perceptron


def fit_networks(
    solved: Solved,
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    how: MlpSettings,
    *,
    only: Sequence[int] | None = None,
    tell: Progress = lambda stage, done, total: None,
) -> Solved:
    """The networks for the layers that `solved` selected; its matrices are left behind.

    only: some of the target's layers, for a study. Both sides have their captures on disk, or models in
    memory. Errors: `KvhubError` where a weight is not finite.
    """
    shape = target.identity.geometry
    tensors: dict[str, Tensor] = {}
    curves: list[list[float]] = []
    numbers = list(range(shape.num_layers)) if only is None else list(only)
    tell("train", 0, len(numbers))
    for done, number in enumerate(numbers, 1):
        sides = _rows(source, target, windows, solved.layers[number], number, settings)
        for side in ("k", "v"):
            inputs, y = sides.pop(0)  # no longer held than it is trained on
            outputs = y.transpose(0, 1) if how.per == "head" else y.flatten(1)[None]
            seed = settings.seed * 1_000_003 + 2 * number + (side == "v")
            layers, curve = train_networks(inputs, outputs, how, seed)
            curves.append(curve)
            tensors |= _stored(f"layers.{number}.{side}", layers, settings)
            del inputs, y, outputs, layers
        tell("train", done, len(numbers))
    return replace(
        solved,
        tensors=tensors,
        perceptron=Perceptron(hidden=list(how.hidden), per=how.per),
        training=Training(
            objective="mean-squared-error",
            steps=how.epochs * -(-_count(windows, settings) // how.batch),
            rate=how.rate,
            batch=how.batch,
            seed=settings.seed,
            tail=0,
            curve=[within_bounds(sum(losses) / len(losses)) for losses in zip(*curves, strict=True)][:256],
        ),
    )


def apply_networks(tensors: Mapping[str, Tensor], prefix: str, rows: Tensor) -> Tensor:
    """One side of one target layer from source rows `[rows, k, H_s, D_s]`: `[rows, H_t * D_t]`."""
    layers = [
        Dense(*(tensors[f"{prefix}.{part}{kind}"].to(rows.device, torch.float32) for kind in Dense._fields))
        for part in MLP_PARTS
    ]
    local = rows.shape[1:].numel() != layers[0].weight.shape[1]
    inputs = grouped(list(rows.float().unbind(1)), local=local)
    found = apply_perceptron(inputs.expand(len(layers[0].weight), -1, -1), layers)
    return found.transpose(0, 1).flatten(1)


def _count(windows: Sequence[Tensor], settings: FitSettings) -> int:
    return sum(len(row_positions(len(w), settings.stride, settings.exact_prefix)) for w in windows)


def _rows(
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    chosen: list[int],
    number: int,
    settings: FitSettings,
) -> list[tuple[Tensor, Tensor]]:
    """(inputs `[g, n, p]`, outputs `[n, H_t, D_t]`) of keys and of values, float32, g as `grouped` has it.

    Window by window into their places: parts to join would be as large again.
    """
    one, two = source.identity.geometry, target.identity.geometry
    n, local = _count(windows, settings), settings.support == "head-local"
    heads, width = one.num_kv_heads, len(chosen) * one.head_dim
    found = [
        (
            torch.empty(n, heads, width).transpose(0, 1) if local else torch.empty(1, n, heads * width),
            torch.empty(n, two.num_kv_heads, two.head_dim),
        )
        for _ in range(2)
    ]
    at = 0
    for window in windows:
        positions = row_positions(len(window), settings.stride, settings.exact_prefix)
        end = at + len(positions)
        read = zip(
            _read(source, window, positions, chosen), _read(target, window, positions, [number]), strict=True
        )
        for (inputs, outputs), (x, y) in zip(found, read, strict=True):
            parts = x.float().view(len(positions), len(chosen), heads, one.head_dim)
            inputs[:, at:end] = grouped(list(parts.unbind(1)), local=local)
            outputs[at:end] = y.view(len(positions), two.num_kv_heads, two.head_dim)
        at = end
    return found


def _read(side: Side, window: Tensor, positions: range, layers: list[int]) -> tuple[Tensor, Tensor]:
    if side.store is not None:
        return side.store.rows(window, positions, layers)
    capture = side.capture(window)
    part = slice(positions.start, positions.stop, positions.step)
    keys = torch.cat([capture.content_keys[layer][part].flatten(1) for layer in layers], dim=1)
    values = torch.cat([capture.values[layer][part].flatten(1) for layer in layers], dim=1)
    return keys, values


def _stored(prefix: str, layers: Sequence[Dense], settings: FitSettings) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for part, layer in zip(MLP_PARTS, layers, strict=True):
        weight = layer.weight.to(getattr(torch, settings.store_dtype))
        for kind, tensor in (("weight", weight), ("bias", layer.bias.float())):
            if not bool(torch.isfinite(tensor).all()):
                raise KvhubError(f"the networks of {prefix} are not finite", "use a smaller rate")
            tensors[f"{prefix}.{part}{kind}"] = tensor.cpu().contiguous()
    return tensors
