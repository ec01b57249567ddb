"""Where the artifacts of a fit go: room for them, and all of them or none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvhub.artifact.manifest import Manifest
from kvhub.errors import BadInput, KvhubError
from kvhub.files import writing
from kvhub.fit.mlp import MlpSettings, parameters
from kvhub.fit.plot import plot_curve
from kvhub.fit.run import Fitted
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry, ModelIdentity


@dataclass(frozen=True)
class Stored:
    """One artifact on disk."""

    directory: Path
    manifest: Manifest


def places(
    source: ModelIdentity, target: ModelIdentity, settings: FitSettings, both: bool, output: Path | None
) -> list[Path] | None:
    """The directories of the artifacts; None for the default, by digest. Errors: `BadInput`."""
    if output is None:
        return None
    if output.exists() and not output.is_dir():
        raise BadInput(f"{output} is a file, not a directory", "--output names a new directory")
    pairs = ((source, target), (target, source))[: 1 + both]
    found = [output / f"{_short(a)}--{_short(b)}--k{settings.k}" for a, b in pairs]
    if len(set(found)) < len(found):
        raise BadInput("both models have one name", "fit one direction at a time with --output")
    return found


def _short(model: ModelIdentity) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", model.name.rsplit("/", 1)[-1]).strip("-.")[:64] or "model"


def demand_space(
    directory: Path, source: Geometry, target: Geometry, settings: FitSettings, both: bool
) -> None:
    itemsize = 2 if settings.store_dtype == "bfloat16" else 4
    pairs = ((source, target), (target, source))[: 1 + both]
    numbers = sum(2 * b.num_layers * _numbers(a, b, settings) for a, b in pairs)
    place = directory.absolute()
    existing = next(parent for parent in (place, *place.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if numbers * itemsize > free:
        raise KvhubError(
            f"the mappers take {numbers * itemsize / 1e6:.3g} MB and {existing} has {free / 1e6:.3g} MB free",
            "free some space, or choose another --output",
        )


def _numbers(source: Geometry, target: Geometry, settings: FitSettings) -> int:
    """Of one side of one target layer."""
    if isinstance(settings.train, MlpSettings):
        return parameters(settings.train, *settings.networks(source, target))
    return target.features * settings.features(source)


def write(fitted: Sequence[Fitted], where: Sequence[Path] | None, mappers: Path, tag: str) -> list[Stored]:
    """Write all artifacts, then put each in its place; nothing is left where that fails.

    An artifact that is in its place already, with the same digest, stays: this fit wrote it before it was
    killed. tag: names the staging directory, so that what a killed fit left is found.
    Errors: `AccessDenied`, `BadInput`, `KvhubError`.
    """
    from kvhub.artifact.write import write_artifact

    root = mappers if where is None else where[0].parent
    done: list[Path] = []
    stored: list[Stored] = []
    with writing(root, "give another --output"):
        root.mkdir(parents=True, exist_ok=True)
        staging = root / f".fit-{tag}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
    try:
        with writing(root, "give another --output"):
            written = []
            for number, one in enumerate(fitted):
                directory = staging / str(number)
                written.append((directory, write_artifact(directory, one.manifest, one.tensors)))
                plot_curve(directory, one.manifest)
            for number, (directory, manifest) in enumerate(written):
                place = mappers / manifest.digest if where is None else where[number]
                if not _there(place, manifest):
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


def _there(place: Path, manifest: Manifest) -> bool:
    from kvhub.artifact.read import read_manifest

    if not place.exists():
        return False
    if read_manifest(place).digest != manifest.digest:
        raise BadInput(f"{place} exists already", "give another --output, or remove it")
    return True
