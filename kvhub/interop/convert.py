"""Import and export. An imported mapper is a draft without evidence until `kvhub eval` measures it here."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kvhub import __version__
from kvhub.artifact.manifest import Calibration, FitScores, Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.errors import BadInput, Incompatible, NotFound
from kvhub.files import writing
from kvhub.interop import kvtransfer, semantic_router, veloxquant
from kvhub.interop.dense import Dense, from_artifact
from kvhub.interop.streaming import Made, tensors_of
from kvhub.model.identity import ModelIdentity
from kvhub.model.pair import check_pair
from kvhub.settings import Settings
from kvhub.store.add import add

LAYOUTS: Mapping[str, ModuleType] = {
    module.NAME: module for module in (semantic_router, kvtransfer, veloxquant)
}


def recognise(directory: Path) -> str:
    """Which layout a directory has. Errors: `NotFound`, `BadInput`."""
    if not directory.is_dir():
        raise NotFound(f"no such directory: {directory}", "name the directory that holds the foreign files")
    for name, module in LAYOUTS.items():
        if module.matches(directory):
            return name
    raise BadInput(f"{directory} has none of the layouts {', '.join(LAYOUTS)}", "--layout names one")


def import_mapper(
    directory: Path,
    source: ModelIdentity,
    target: ModelIdentity,
    *,
    layout: str | None = None,
    settings: Settings | None = None,
) -> tuple[Path, Manifest]:
    """A foreign mapper as one of ours, registered as a draft.

    source, target: the live models that it was fitted on; none of these layouts says enough to know
    them. Whatever it claims of its quality is not taken over.
    Errors: `BadInput`, `Corrupt`, `Incompatible`, `NotFound`, `AccessDenied`.
    """
    settings = settings or Settings.load()
    check_pair(source, target)
    name = layout or recognise(directory)
    dense: Dense = LAYOUTS[name].read(directory, source, target)
    dense = dense.ascending()
    manifest = _manifest(dense, source, target, _digest(directory))
    shape = (target.geometry.num_kv_heads, target.geometry.head_dim)

    def ours(name: str) -> Tensor:
        _, t, side, part = name.split(".")
        return dense.weights[int(t), side] if part == "weight" else dense.biases[int(t), side].view(shape)

    tensors = Made(
        [f"layers.{t}.{side}.{part}" for t, side in dense.weights for part in ("weight", "bias")], ours
    )
    return add(manifest, tensors, settings, tag=f"import-{manifest.calibration.digest[:16]}")


def export_mapper(directory: Path, output: Path, layout: str, *, drop_exact_prefix: bool = False) -> Manifest:
    """One of our artifacts in a foreign layout, in a new directory, whole or not at all.

    drop_exact_prefix: no foreign layout can say that the first positions must be the target's own.
    Errors: `Incompatible` for what the layout cannot say, `BadInput`, `Corrupt`, `AccessDenied`.
    """
    manifest = verify_artifact(directory, deep=True)
    if manifest.normalised:
        raise Incompatible(
            f"its mapped keys go through the target's k_norm; {layout} cannot say so",
            "export one that was fitted with --normalise-keys off",
            code="family",
        )
    if manifest.family != "ridge":
        raise Incompatible(f"mappers of family {manifest.family!r} have no such layout", code="family")
    if manifest.weights_dtype == "int8":
        raise Incompatible("int8 weights have no such layout", "export what it was made from", code="family")
    if manifest.exact_prefix and not drop_exact_prefix:
        raise Incompatible(
            f"the first {manifest.exact_prefix} positions must be the target's own; {layout} cannot say so",
            "--drop-exact-prefix exports it all the same; whoever applies it must see to that",
            code="exact_prefix",
        )
    dense = from_artifact(manifest, tensors_of(directory, manifest))
    if output.is_symlink() or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise BadInput(f"{output} exists already", "nothing is overwritten: choose another directory")
    with writing(output, "choose a directory that you may write"):
        output.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{output.name[:64]}.", dir=output.parent))
        try:
            LAYOUTS[layout].write(staged, manifest, dense)
            staged.chmod(0o755)
            staged.rename(output)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return manifest


def _manifest(dense: Dense, source: ModelIdentity, target: ModelIdentity, digest: str) -> Manifest:
    return Manifest(
        kvhub_version=__version__,
        family="ridge",
        support="full",
        source=source,
        target=target,
        k=len(dense.source_layers[0]),
        regularization=dense.strength,
        regularization_convention="absolute-mean",
        objective=f"imported from {dense.layout}: {dense.name or 'unnamed'} (strength in its own convention)",
        source_layers=dense.source_layers,
        exact_prefix=0,
        weights_dtype="float32",
        # Not known: the least that a manifest can say, and the digest of what was imported.
        calibration=Calibration(
            dataset=f"unknown (imported from {dense.layout})",
            revision=None,
            sequences=1,
            length=1,
            stride=1,
            tokens=1,
            rows=1,
            digest=digest,
        ),
        fit_scores=FitScores(rows=1, r2_key=[], r2_value=[]),
        created=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        files=[],
    )


def _digest(directory: Path) -> str:
    """sha256 over the names and contents of the imported files."""
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
