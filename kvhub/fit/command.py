"""From two references and some text files to registered artifacts: what `kvhub fit` does."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvhub.artifact.manifest import Manifest
from kvhub.errors import AccessDenied, BadInput, KvhubError
from kvhub.fit.calibration import calibration_set, load_corpora, row_positions
from kvhub.fit.run import Fitted, Progress, demand_possible, fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry, ModelIdentity


@dataclass(frozen=True)
class Stored:
    """One artifact on disk."""

    directory: Path
    manifest: Manifest


def fit(
    source: str,
    target: str,
    texts: Sequence[Path],
    settings: FitSettings,
    *,
    both: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    output: Path | None = None,
    mappers: Path,
    progress: Progress | None = None,
) -> list[Stored]:
    """Fit `source -> target` (and back, with `both`), write the artifacts and register them as drafts.

    source, target: a directory or `org/name[@revision]`. dtype: of the forwards;
    None is each model's own. Artifacts go to `mappers/<digest>`, or with `output`
    to `output/<source>--<target>--k<k>`. What can be refused without running the
    models is refused first, from their configs and the text. Nothing is left on
    disk where anything fails or Ctrl-C comes before all artifacts are written.
    Errors: every `KvhubError`.
    """
    from kvhub.catalog import register
    from kvhub.model.identify import identify
    from kvhub.model.load import load_model
    from kvhub.model.pair import check_pair
    from kvhub.model.resolve import resolve
    from kvhub.model.tokenizer import load_tokenizer

    corpora = load_corpora(texts, seed=settings.seed)
    paths = resolve(source), resolve(target)
    one, other = (identify(path, dtype="float32") for path in paths)
    check_pair(one, other)
    _demand_context((one, other), settings)
    places = _places(one, other, settings, both, output)
    demand_possible(one.geometry, other.geometry, settings, both=both)
    windows = calibration_set(
        corpora, load_tokenizer(paths[0]), sequences=settings.sequences, length=settings.length
    )
    positions = row_positions(settings.length, settings.stride, settings.exact_prefix)
    demand_possible(one.geometry, other.geometry, settings, both=both, rows=len(windows.fit) * len(positions))
    _demand_space(output or mappers, one.geometry, other.geometry, settings, both)

    here, there = (load_model(path, dtype, device=device) for path in paths)
    fitted = fit_pair(here, there, windows, settings, both=both, progress=progress)
    stored = _write(fitted, places, mappers)
    for artifact in stored:
        register(artifact.directory, artifact.manifest)
    return stored


def _demand_context(models: Sequence[ModelIdentity], settings: FitSettings) -> None:
    for model in models:
        if settings.length > model.rope.context:
            raise BadInput(
                f"--length {settings.length} exceeds the context of {model.name} ({model.rope.context})"
            )


def _places(
    source: ModelIdentity, target: ModelIdentity, settings: FitSettings, both: bool, output: Path | None
) -> list[Path] | None:
    """Where the artifacts go, refused now if something is there; None for the default."""
    if output is None:
        return None
    if output.exists() and not output.is_dir():
        raise BadInput(f"{output} is a file, not a directory")
    pairs = ((source, target), (target, source))[: 1 + both]
    places = [output / f"{_short(a)}--{_short(b)}--k{settings.k}" for a, b in pairs]
    for place in places:
        if place.is_symlink() or place.exists():
            raise BadInput(f"{place} exists already", "give another --output, or remove it")
    if len(set(places)) < len(places):
        raise BadInput("both models have one name", "fit one direction at a time with --output")
    return places


def _short(model: ModelIdentity) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", model.name.rsplit("/", 1)[-1]).strip("-.")[:64] or "model"


def _demand_space(
    directory: Path, source: Geometry, target: Geometry, settings: FitSettings, both: bool
) -> None:
    itemsize = 2 if settings.store_dtype == "bfloat16" else 4
    pairs = ((source, target), (target, source))[: 1 + both]
    numbers = sum(2 * b.num_layers * b.features * settings.features(a) for a, b in pairs)
    place = directory.absolute()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if numbers * itemsize > free:
        raise KvhubError(
            f"the mappers take {numbers * itemsize / 1e6:.0f} MB and {existing} has {free / 1e6:.0f} MB free",
            "free some space, or choose another --output",
        )


def _write(fitted: Sequence[Fitted], places: Sequence[Path] | None, mappers: Path) -> list[Stored]:
    from kvhub.artifact.write import write_artifact

    root = mappers if places is None else places[0].parent
    done: list[Path] = []
    stored: list[Stored] = []
    try:
        root.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".fit-", dir=root))
    except PermissionError:
        raise AccessDenied(f"{root} may not be written") from None
    try:
        written = [
            (staging / str(number), write_artifact(staging / str(number), one.manifest, one.tensors))
            for number, one in enumerate(fitted)
        ]
        for number, (directory, manifest) in enumerate(written):
            place = mappers / manifest.digest if places is None else places[number]
            if places is not None or not place.exists():  # an equal digest is an equal artifact
                directory.rename(place)
                done.append(place)
            stored.append(Stored(place.absolute(), manifest))
    except BaseException:
        for place in done:
            shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return stored
