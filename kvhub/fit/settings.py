"""What a fit may be told."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvhub.errors import BadInput
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.ridge import PAPER, Regularization, Support
from kvhub.fit.selection import demand_k
from kvhub.model.identity import Geometry
from kvhub.strict_json import shown

GRID_K = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24)
"""What `--k auto` tries, and all source layers."""
GRID_LAMBDA = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
"""What `--lambda auto` tries, relative to the mean diagonal."""

DEFAULT_RECIPE: dict[str, Any] = {
    "first_weight": 0,
    "stretch": 0.5,
    "stretch_values": 0.5,
    "normalise_keys": "auto",
}
"""What `--recipe default` adds to ridge: the best closed form on tuning windows (docs/fidelity.md)."""
BEST_RECIPE: dict[str, Any] = {"first_weight": 0, "normalise_keys": "auto"}
"""What `--recipe best` takes as it is: moments are summed once, and the norm is asked for before them."""


@dataclass(frozen=True)
class FitSettings:
    """Defaults are the paper's where it has one: 500 x 1,024 tokens, every 4th (arXiv 2608.03893, 3.1)."""

    k: int | Literal["all", "auto"] = 8
    regularization: Regularization | Literal["auto"] = field(default_factory=Regularization)
    support: Support = "full"
    sequences: int = 500
    length: int = 1024
    lengths: tuple[int, ...] | None = None
    """Windows of several lengths, in turn; `length` is then the longest."""
    stride: int = 4
    exact_prefix: int = 0
    store_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    recipe: Literal["paper", "default", "best"] | None = None
    """`best` searches over closed-form recipes; the others are names for what the options say."""
    tries: int = 24
    """Candidates that `best` measures, at most."""
    first_weight: int = 1
    """How many times the row of the first position counts; 0: as its keys ask for
    (`kvhub.fit.recipes.first`)."""
    stretch: float = 0.0
    """How much of the spread that ridge takes from keys is given back (`kvhub.fit.recipes.scale`)."""
    stretch_values: float = 0.0
    """And from values."""
    normalise_keys: Literal["auto", "on", "off"] = "off"
    """Mapped keys through the target's k_norm (`kvhub.fit.recipes.normalise`); auto: where it has one that
    keys can go through, and with `recipe="best"` where that is better."""
    train: Distill | MlpSettings | None = None
    """Gradient steps after the closed form, or the `mlp` family in its place."""
    created: str | None = None
    """ISO 8601 time to record; None is now. Part of the digest: fix it to get the same digest twice."""

    def __post_init__(self) -> None:
        if self.lengths is not None and max(self.lengths, default=0) != self.length:
            raise BadInput("length must be the longest of lengths", "give --length alone, or leave it out")
        if min(self.sequences, self.shortest, self.stride) < 1:
            raise BadInput("--sequences, --length and --stride must be at least 1", "leave them out")
        if min(self.first_weight, self.stretch, self.stretch_values) < 0:
            raise BadInput("first_weight, stretch and stretch_values must not be negative")
        if self.tries < 1:
            raise BadInput("--tries must be at least 1", "leave it out")
        if self.recipe == "best" and self.automatic:
            raise BadInput("--recipe best goes over lambda itself and needs a k that bounds the cost")
        mlp = isinstance(self.train, MlpSettings)
        if mlp and self.support == "head-local" and self.train.per != "head":  # type: ignore[union-attr]
            raise BadInput("head-local support needs one network a head", "use --networks head")
        if mlp and self.recipe == "best":
            raise BadInput("--recipe best is for the ridge family")
        if mlp and self.normalise_keys != "off":
            raise BadInput("--normalise-keys is for the ridge family", "leave it out, or use --family ridge")
        if not 0 <= self.exact_prefix < self.shortest:
            raise BadInput(
                f"--exact-prefix {self.exact_prefix} leaves no row of a window of {self.shortest} tokens",
                "use a smaller --exact-prefix, or longer windows (--length)",
            )

    @property
    def shortest(self) -> int:
        """Tokens of the shortest window."""
        return min(self.lengths) if self.lengths else self.length

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        return self.length

    @property
    def automatic(self) -> bool:
        """Whether k or lambda is chosen on held-out text."""
        return "auto" in (self.k, self.regularization)

    @property
    def tunes(self) -> bool:
        """Whether text is set aside to choose on."""
        return self.automatic or self.recipe == "best" or isinstance(self.train, Distill)

    def grid(self, source: Geometry) -> list[int]:
        """Every k that is fitted for this source, ascending: the one asked for, or those to choose from.

        Errors: `BadInput` naming the largest k where the one asked for cannot be used.
        """
        every = source.num_layers
        if self.k == "auto":
            return [*(k for k in GRID_K if k < every), every]
        k = every if self.k == "all" else self.k
        demand_k(k, source)
        return [k]

    def width(self, source: Geometry, k: int) -> int:
        """Inputs of one regression: `k * H_s * D_s`, or `k * D_s` for head-local."""
        return k * (source.features if self.support == "full" else source.head_dim)

    def features(self, source: Geometry) -> int:
        """Inputs of the widest regression that is solved."""
        return self.width(source, self.grid(source)[-1])

    def inputs(self, source: Geometry) -> int:
        """Source features that the regressions of one target layer read, all heads together."""
        return self.grid(source)[-1] * source.features

    def networks(self, source: Geometry, target: Geometry) -> tuple[int, int, int]:
        """(networks, inputs, outputs) of one side of one target layer in the `mlp` family."""
        assert isinstance(self.train, MlpSettings)
        groups = target.num_kv_heads if self.train.per == "head" else 1
        return groups, self.features(source), target.features // groups

    def describe(self) -> dict[str, Any]:
        """All of it but the time, as JSON values by option name."""
        values = asdict(self)
        del values["created"]
        values["lambda"] = values.pop("regularization")
        left_out = {"recipe": None, "tries": 24, "first_weight": 1, "stretch": 0.0, "stretch_values": 0.0}
        for name, plain in (left_out | {"normalise_keys": "off"}).items():
            if values[name] == plain:
                del values[name]
        if values.pop("train") is not None:
            values["train"] = {"how": type(self.train).__name__, **asdict(self.train)}  # type: ignore[arg-type]
        return values


def parse_regularization(text: str) -> Regularization | Literal["auto"]:
    """`paper`, `auto`, or a number of at least 0 relative to the Gram's mean diagonal. Errors: `BadInput`."""
    if text == "paper":
        return PAPER
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(
            f"--lambda {shown(text, 32)} is neither `paper`, `auto` nor a number of at least 0",
            "1e-3 suits most pairs; auto chooses on held-out text",
        )
    return Regularization(value)


def parse_training(
    family: str,
    distill: int | None,
    hidden: str,
    networks: Literal["head", "layer"],
    epochs: int,
    batch: int,
    *,
    default: bool,
) -> Distill | MlpSettings | None:
    """What the options ask of gradients; distill: None where nobody asked. Errors: `BadInput`."""
    if family != "mlp":
        if distill is None:
            return Distill(if_possible=True) if default else None
        return Distill(steps=distill) if distill else None
    if distill:
        raise BadInput("--distill is for the ridge family")
    try:
        first, second = (int(part) for part in hidden.split(","))
    except ValueError:
        raise BadInput(f"--hidden {hidden} is not two numbers with a comma", "--hidden 512,512") from None
    return MlpSettings(hidden=(first, second), per=networks, epochs=epochs, batch=batch)


def parse_k(text: str) -> int | Literal["all", "auto"]:
    """A number of source layers, `all` of them, or `auto`. Errors: `BadInput`."""
    if text == "all":
        return "all"
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise BadInput(
            f"--k {shown(text, 32)} is neither a number, `all` nor `auto`", "8 suits most pairs; auto chooses"
        ) from None


def parse_lengths(text: str) -> tuple[int, tuple[int, ...] | None]:
    """`1024`, or several as `256,1024`: (the longest, all of them or None for one). Errors: `BadInput`."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(
            f"--length {shown(text, 64)} is not a number, nor several with commas",
            "--length 1024, or 256,1024",
        ) from None
    return max(lengths), lengths if len(lengths) > 1 else None
