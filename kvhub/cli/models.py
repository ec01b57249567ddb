"""What commands that run both models of a mapper share: finding them, loading them, showing progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.cli import output
from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.model.identity import ModelIdentity
    from kvhub.model.load import LoadedModel


def locate_models(manifest: Manifest, source: str | None, target: str | None) -> list[Path]:
    """Where source and target are: as given, else the Hub revisions in the manifest.

    A model that is not the mapper's is refused here, before gigabytes of weights are read.
    """
    return [_locate("source", manifest.source, source), _locate("target", manifest.target, target)]


def load_models(manifest: Manifest, paths: Sequence[Path], device: str) -> tuple[LoadedModel, LoadedModel]:
    """Source and target from `paths`, each in the dtype that the mapper was fitted on."""
    import torch

    from kvhub.model.load import load_model

    device = known_device(device)
    source, target = (
        load_model(path, getattr(torch, fitted.dtype), device=device)
        for path, fitted in zip(paths, (manifest.source, manifest.target), strict=True)
    )
    return source, target


def known_device(device: str) -> str:
    """`auto` is CUDA where there is one."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _locate(role: str, fitted: ModelIdentity, given: str | None) -> Path:
    """Where the model is: as given, else the Hub revision in the manifest; refused when it is another."""
    from kvhub.evaluation.run import check_model
    from kvhub.model.identify import identify
    from kvhub.model.resolve import resolve

    if given is None:
        kind, _, revision = fitted.revision.partition(":")
        if kind != "commit":
            raise BadInput(
                f"the {role} {fitted.name} was fitted from a directory, which the mapper does not know",
                f"give --{role} DIR",
            )
        given = f"{fitted.name}@{revision}"
    path = resolve(given)
    check_model(role, fitted, identify(path, dtype=fitted.dtype))
    return path


class Progress:
    """On stderr: a bar with the time left on a terminal, else a line every half minute."""

    def __enter__(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        self._told = time.monotonic()
        self._bar = Bar(console=console, transient=True) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("evaluating", total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._told >= 30:
            self._told = time.monotonic()
            output.note(f"evaluating: {done}/{total} windows")
