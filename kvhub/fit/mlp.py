"""Fit the networks of one target layer (arXiv 2608.03893, section 4.4): mean squared error, Adam.

The paper says two hidden layers of 1,024 with ReLU, one network for each target head, and the same rows
as the ridge; a secondary source says Adam at 1e-3, 20 epochs, 4,096 rows a step. Rows are standardised
here, which the paper does not mention, and that is folded into the first and the last layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub_kernels.mlp import Dense, perceptron

_TRIED = 1024
"""Rows."""
_COLUMNS = 64
"""Of all rows in float64 at once."""


@dataclass(frozen=True)
class MlpSettings:
    """Defaults are the paper's."""

    hidden: tuple[int, int] = (1024, 1024)
    per: Literal["head", "layer"] = "head"
    epochs: int = 20
    batch: int = 4096
    """Rows a step."""
    rate: float = 1e-3

    def __post_init__(self) -> None:
        if min(*self.hidden, self.epochs, self.batch) < 1 or max(self.hidden) > 65536 or not self.rate > 0:
            raise BadInput("a hidden layer has 1 to 65536 units, and at least one epoch is needed")


def train_networks(
    inputs: Tensor, outputs: Tensor, settings: MlpSettings, seed: int
) -> tuple[list[Dense], list[float]]:
    """inputs `[g, n, p]`, outputs `[g, n, c]`, float32; the dense layers and the loss of every epoch.

    inputs may have one group for several of outputs. The loss is over the variance: 1 is a constant.
    The result depends on seed, rows and their order alone.
    """
    (mean_x, spread_x), (mean_y, spread_y) = _moments(inputs), _moments(outputs)
    chance = torch.Generator().manual_seed(seed)
    groups, widths = len(outputs), (inputs.shape[2], *settings.hidden, outputs.shape[2])
    layers = [_begin(groups, a, b, chance, inputs.device) for a, b in pairwise(widths)]
    trained = [tensor.requires_grad_(True) for layer in layers for tensor in layer]
    adam = torch.optim.Adam(trained, lr=settings.rate)
    count, curve = inputs.shape[1], []
    for _ in range(settings.epochs):
        total = 0.0
        order = torch.randperm(count, generator=chance).to(inputs.device)
        for start in range(0, count, settings.batch):
            chosen = order[start : start + settings.batch]
            adam.zero_grad(set_to_none=True)
            x = inputs[:, chosen].sub_(mean_x).div_(spread_x).expand(groups, -1, -1)
            y = outputs[:, chosen].sub_(mean_y).div_(spread_y)
            loss = (perceptron(x, layers) - y).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            del x, y
            adam.step()
            total += float(loss.detach()) * len(chosen)
        curve.append(total / count)
    with torch.no_grad():
        return _fold(layers, mean_x, spread_x, mean_y, spread_y), curve


def parameters(settings: MlpSettings, groups: int, width: int, out: int) -> int:
    """Numbers in the networks of one side of a layer: width inputs and out outputs in each group."""
    first, second = settings.hidden
    return groups * ((width + 1) * first + (first + 1) * second + (second + 1) * out)


def step_floats(settings: MlpSettings, groups: int, width: int, out: int, rows: int) -> int:
    """What steps on `rows` rows hold: weights, gradients, Adam's two moments, and more.

    Going through the hidden rows with their gradients, in an update what Adam works with.
    """
    first, second = settings.hidden
    weights = parameters(settings, groups, width, out)
    hidden = groups * rows * max(first + 3 * second, 3 * first + second)
    update = 2 * groups * max(width * first, first * second, second * out)
    return 4 * weights + max(hidden + 3 * groups * rows * out, update)


def training_rate(settings: MlpSettings) -> float:
    """Multiplications and additions a second of passes through one network and back, here and now."""
    first, second = (min(width, 1024) for width in settings.hidden)
    layers = [Dense(torch.zeros(1, a, b), torch.zeros(1, b)) for a, b in ((first, first), (first, second))]
    for tensor in (layers[1].weight, layers[0].weight):
        tensor.requires_grad_(True)
    rows, best = torch.ones(1, _TRIED, first), 0.0
    for _ in range(2):  # the first one pays for warming up
        began = time.perf_counter()
        perceptron(rows, layers).square().mean().backward()  # type: ignore[no-untyped-call]
        flops = _TRIED * (4 * first * first + 6 * first * second)
        best = max(best, flops / max(time.perf_counter() - began, 1e-6))
    return best


def _begin(groups: int, a: int, b: int, chance: torch.Generator, device: torch.device) -> Dense:
    """Uniform in +-1/sqrt(inputs), as torch begins a linear layer."""
    bound = a**-0.5

    def draw(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=chance) * 2 - 1).mul_(bound).to(device)

    return Dense(draw(groups, a, b), draw(groups, b))


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows, `[g, 1, features]`; what never varies has spread 1."""
    found = [
        torch.std_mean(rows[:, :, at : at + _COLUMNS].double(), dim=1, keepdim=True, correction=0)
        for at in range(0, rows.shape[2], _COLUMNS)
    ]
    spread, mean = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
    return mean.float(), torch.where(spread > 1e-6, spread, 1.0).float()


def _fold(
    layers: Sequence[Dense], mean_x: Tensor, spread_x: Tensor, mean_y: Tensor, spread_y: Tensor
) -> list[Dense]:
    first, *between, last = layers
    weight = first.weight / spread_x.transpose(1, 2)
    bias = first.bias - (mean_x @ weight)[:, 0]
    ending = Dense(last.weight * spread_y, last.bias * spread_y[:, 0] + mean_y[:, 0])
    return [Dense(*(t.detach() for t in layer)) for layer in (Dense(weight, bias), *between, ending)]
