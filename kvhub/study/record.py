"""What one model does on one window, kept on disk: enough to score any mapper from or to it.

    DIR/<digest of the model's identity>/<sha256 of the token ids>-<tail>.safetensors

`keys`, `values`: the rows of the prefix, `[layers, prefix, num_kv_heads, head_dim]` as the model caches them;
`logits`: of the native tail, `[tail - 1, vocabulary]` in the model's dtype (its float32 form is exact);
`queries`: of the tail, `[layers, num_attention_heads, tail - 1, head_dim]`; `window`: the token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvhub.errors import Corrupt
from kvhub.evaluation.inject import KvRows, injection_error, run
from kvhub.evaluation.metrics import LogitSums
from kvhub.evaluation.probe import QueryProbe
from kvhub.fit.store import write_tensors
from kvhub.fit.text import token_digest
from kvhub.strict_json import shown
from kvhub.study.compare import Native

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


@dataclass(frozen=True)
class Recording:
    """One model on one window `[prefix + tail]`; the first tail token's logits are not scored."""

    window: Tensor
    rows: KvRows
    """Of the prefix."""
    logits: Tensor
    """Native, `[tail - 1, vocabulary]`, in the model's dtype."""
    queries: Tensor
    """`[layers, heads, tail - 1, head_dim]`, after q_norm and RoPE."""
    scaling: list[float]
    """The factor on q.k of every layer."""
    native: LogitSums
    empty: LogitSums
    """The tail on no cache at all, at its true positions."""
    injection_error: float

    @property
    def tail(self) -> Tensor:
        """The tokens that the target runs after the prefix: all of the tail but the last, a label only."""
        return self.window[len(self.rows) : -1]

    @property
    def labels(self) -> Tensor:
        """What follows the tokens of `tail`, `[tail - 1]`: the first tail token is no label."""
        return self.window[len(self.rows) + 1 :]


def recording_path(root: Path, digest: str, window: Tensor, tail: int) -> Path:
    """Where the recording of a model (by its identity's digest) is."""
    return root / digest / f"{token_digest([window[None]])}-{tail}.safetensors"


def record(model: LoadedModel, window: Tensor, tail: int, *, check: bool = True) -> Recording:
    """Run `model` natively, on its own cache put back, and on none. window: `[prefix + tail]` int64.

    check: False leaves the injection check out, its error is then 0.
    """
    split = len(window) - tail
    body, rest, labels = window[:-1], window[split:-1], window[split + 1 :]
    with QueryProbe(model.model, len(rest)) as probe:
        logits, cache = run(model.model, body, keep=len(rest))
    rows = KvRows.of(cache, split)
    del cache
    rows.check_finite("the model's own cache")
    error = 0.0
    if check:
        error = injection_error(logits, run(model.model, rest, start=split, rows=rows)[0])
    native = Native(logits, labels)
    empty = native.sums(run(model.model, rest, start=split)[0])
    layers = range(len(rows.keys))
    return Recording(
        window,
        rows,
        logits.to(model.model.dtype),
        torch.stack([probe.queries[layer] for layer in layers]),
        [probe.scaling[layer] for layer in layers],
        native.own,
        empty,
        error,
    )


def save(path: Path, made: Recording) -> None:
    """Write a recording, whole or not at all. Errors: `AccessDenied`, `KvhubError`."""
    about = {
        "scaling": made.scaling,
        "native": [made.native.nll, made.native.kl, made.native.top1],
        "empty": [made.empty.nll, made.empty.kl, made.empty.top1],
        "injection_error": made.injection_error,
    }
    tensors = {
        "window": made.window,
        "keys": torch.stack(made.rows.keys),
        "values": torch.stack(made.rows.values),
        "queries": made.queries,
        "logits": made.logits,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(path, {k: v.cpu() for k, v in tensors.items()}, {"recording": json.dumps(about)})


def load(path: Path, *, logits: bool = True) -> Recording:
    """Read a recording; logits: False leaves them empty. Errors: `Corrupt`."""
    names = ("window", "keys", "values", "queries", *(("logits",) if logits else ()))
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in names}
            about = json.loads(file.metadata()["recording"])
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(f"{path} is no recording: {shown(error)}", "remove it; it is made again") from None
    return Recording(
        found["window"],
        KvRows(tuple(found["keys"]), tuple(found["values"])),
        found.get("logits", torch.empty(0)),
        found["queries"],
        about["scaling"],
        LogitSums(*about["native"]),
        LogitSums(*about["empty"]),
        about["injection_error"],
    )
