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
from kvhub_kernels.mlp import Dense, apply_perceptron


def fit_networks(
    solved: Solved,
    source: Side,
    target: Side,
    windows: Sequence[Tensor],
    settings: FitSettings,
    how: MlpSettings,
    *,
    tell: Progress = lambda stage, done, total: None,
) -> Solved:
    """The networks for the layers that `solved` selected; its matrices are left behind.

    Both sides have their captures on disk, or models in memory. Errors: `KvhubError` where a
    weight is not finite.
    """
    shape = target.identity.geometry
    tensors: dict[str, Tensor] = {}
    curves: list[list[float]] = []
    tell("train", 0, shape.num_layers)
    for number, chosen in enumerate(solved.layers):
        for side, (x, y) in zip(
            ("k", "v"), _rows(source, target, windows, chosen, number, settings), strict=True
        ):
            inputs = grouped(list(x.unbind(1)), local=settings.support == "head-local")
            outputs = y.transpose(0, 1) if how.per == "head" else y.flatten(1)[None]
            seed = settings.seed * 1_000_003 + 2 * number + (side == "v")
            layers, curve = train_networks(inputs, outputs, how, seed)
            curves.append(curve)
            tensors |= _stored(f"layers.{number}.{side}", layers, settings)
        tell("train", number + 1, shape.num_layers)
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
            curve=[sum(losses) / len(losses) for losses in zip(*curves, strict=True)][:256],
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
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(inputs `[n, k, H_s, D_s]`, outputs `[n, H_t, D_t]`) of keys and of values, float32."""
    found: list[list[Tensor]] = [[], [], [], []]
    shapes = source.identity.geometry, target.identity.geometry
    sides = ((source, chosen, shapes[0]), (target, [number], shapes[1]))
    for window in windows:
        positions = row_positions(len(window), settings.stride, settings.exact_prefix)
        for at, (side, layers, shape) in enumerate(sides):
            for kind, rows in enumerate(_read(side, window, positions, layers)):
                view = rows.float().view(len(positions), len(layers), shape.num_kv_heads, shape.head_dim)
                found[2 * kind + at].append(view)
    keys, key, values, value = (torch.cat(parts) for parts in found)
    return (keys, key[:, 0]), (values, value[:, 0])


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
