"""From two references and some text to registered artifacts: what `kvhub fit` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import kvhub
from kvhub.errors import AccessDenied, BadInput
from kvhub.fit.blocks import block_bytes, layers_at_once
from kvhub.fit.budget import Budget, budget
from kvhub.fit.calibration import CalibrationSet, Corpus, calibration_set
from kvhub.fit.captures import CaptureStore, demand_disk
from kvhub.fit.checkpoint import Checkpoint, fit_key
from kvhub.fit.distill.schedule import Distill, demand_tail
from kvhub.fit.expect import Expected, choice_windows, distil_windows, solve_seconds, train_seconds
from kvhub.fit.memory import demand_memory, free_memory, held, release, return_freed
from kvhub.fit.places import Stored, demand_space, places, write
from kvhub.fit.progress import FITS
from kvhub.fit.recipes.normalise import normalises
from kvhub.fit.run import Fitted, Progress, demand_possible, fit_sides
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.text import token_digest
from kvhub.fit.workers import Workers, workers
from kvhub.model.finite import demand_finite
from kvhub.model.identity import ModelIdentity
from kvhub.settings import Settings

__all__ = ["Options", "Stored", "fit"]


@dataclass(frozen=True)
class Options:
    """How a fit runs; none of it changes the result."""

    device: str = "cpu"
    k_as_possible: bool = False
    """Nobody named k: all layers where there are fewer than the default."""
    output: Path | None = None
    """None: `KVHUB_HOME/mappers/<digest>`; else `output/<source>--<target>--k<k>`."""
    checkpoint: Path | None = None
    """None: under the cache, by everything that determines the result."""
    every: int | None = None
    """Windows between checkpoints; None: by time."""
    captures: Path | None = None
    """Keep both models' captures here, and use those that are there."""
    low_memory: bool = False
    memory: int | None = None
    """Bytes that may be used; None: what is free."""
    progress: Progress | None = None
    say: Callable[[str], None] = field(default=lambda line: None)
    """For lines before and during the fit."""


def fit(
    source: str,
    target: str,
    corpora: Callable[[Any], list[Corpus]],
    settings: FitSettings,
    *,
    both: bool = False,
    dtype: torch.dtype | None = None,
    options: Options | None = None,
) -> list[Stored]:
    """Fit `source -> target` (and back, with `both`), write the artifacts and register them as drafts.

    source, target: a directory or `org/name[@revision]`. corpora: the text, given the source's tokenizer.
    dtype: of the forwards; None is each model's own. What can be refused without running the models is
    refused first. Killed or interrupted, the same call goes on from its checkpoint and gives the same
    artifact; nothing half written is ever registered. Started by torchrun, all processes but the first
    return nothing. Errors: every `KvhubError`.
    """
    from kvhub.catalog import register
    from kvhub.model.pair import check_pair
    from kvhub.model.resolve import resolve
    from kvhub.model.tokenizer import load_tokenizer

    options = options or Options()
    return_freed()
    paths = resolve(source), resolve(target)
    one, other = (_identity(path, dtype) for path in paths)
    check_pair(one, other)
    for found in (other, one)[: 1 + both]:
        normalises(settings, found)
    if options.k_as_possible and isinstance(settings.k, int):
        most = min(one.geometry.num_layers, other.geometry.num_layers if both else settings.k)
        settings = replace(settings, k=min(settings.k, most))
    for option, place in (("output", options.output), ("checkpoint", options.checkpoint)):
        if place is not None:
            demand_writable(place, f"--{option}")
    if options.captures is not None:
        demand_writable(options.captures, "--captures")
    _demand_context((one, other), settings)
    kept = Settings.load()
    where = places(one, other, settings, both, options.output)
    demand_possible(one.geometry, other.geometry, settings, both=both)
    tokenizer = load_tokenizer(paths[0])
    settings, windows = _windows(corpora(tokenizer), tokenizer, settings, options)
    release()  # the text
    rows = windows.rows(settings.stride, settings.exact_prefix)
    demand_possible(one.geometry, other.geometry, settings, both=both, rows=rows)
    demand_space(options.output or kept.mappers, one.geometry, other.geometry, settings, both)
    for path, found in zip(paths, (one, other), strict=True):
        demand_finite(path, getattr(torch, found.dtype))

    described = _describe(one, other, windows, settings, both, options)
    directory = options.checkpoint or kept.cache / FITS / fit_key(described)
    with ExitStack() as stack:
        team = stack.enter_context(workers())
        checkpoint = Checkpoint(directory, described, every=options.every)
        if team.first:
            stack.enter_context(checkpoint.held())
            if checkpoint.damaged:
                options.say(f"note: {checkpoint.damaged}: starting again")
            elif checkpoint.windows:
                options.say(f"going on after {checkpoint.windows} windows ({directory})")
        for place in where or ():
            _demand_free(place, checkpoint)
        team.wait()
        if not team.first:
            checkpoint.join()
        sides = _sides(paths, (one, other), dtype, settings, windows, options, directory, team)
        every = [*windows.fit, *windows.tuning, *windows.held_out]
        plan, layers = _plan(paths, sides, every, len(windows.fit), settings, both, options, checkpoint, team)
        demand_disk([side.store for side in sides if side.store], list(filter(sides[0].keeps, every)))
        if team.first:
            options.say(f"memory: {plan}" + (f"; {layers} target layers at a time" if layers else ""))
        fitted = fit_sides(
            *sides,
            windows,
            settings,
            both=both,
            low_memory=options.low_memory or layers is not None,
            layers=layers,
            checkpoint=checkpoint,
            team=team,
            progress=_progress(sides, settings, rows, both, options, team),
            say=options.say,
        )
        if not team.first:
            return []
        return _keep(fitted, where, kept.mappers, checkpoint, register)


def _windows(
    corpora: list[Corpus], tokenizer: Any, settings: FitSettings, options: Options
) -> tuple[FitSettings, CalibrationSet]:
    """The calibration set; without distillation where nobody asked for it and the text is too short."""

    def cut(settings: FitSettings) -> CalibrationSet:
        return calibration_set(
            corpora,
            tokenizer,
            sequences=settings.sequences,
            length=settings.length,
            lengths=settings.lengths,
            tuning=settings.tunes,
        )

    if not (isinstance(settings.train, Distill) and settings.train.if_possible):
        return settings, cut(settings)
    try:
        found = cut(settings)
        demand_tail(settings.train, [*found.fit, *found.tuning], settings.exact_prefix)
        return settings, found
    except BadInput as error:
        plain = replace(settings, train=None)
        found = cut(plain)  # where this fails too, that is the message
        options.say(f"note: not distilled: {error.message}")
        return plain, found


def _keep(
    fitted: Sequence[Fitted],
    where: list[Path] | None,
    mappers: Path,
    checkpoint: Checkpoint,
    register: Callable[..., None],
) -> list[Stored]:
    stored = write(fitted, where, mappers, checkpoint.tag)
    for artifact in stored:
        register(artifact.directory, artifact.manifest)
    checkpoint.remove()
    return stored


def _identity(path: Path, dtype: torch.dtype | None) -> ModelIdentity:
    from kvhub.model.config import read_config
    from kvhub.model.identify import identify
    from kvhub.model.load import load_model

    if dtype is None:
        found = getattr(read_config(path).config, "dtype", None)
        if not isinstance(found, torch.dtype):
            return load_model(path).identity  # the config does not say: the weights do
        dtype = found
    return identify(path, dtype=str(dtype).removeprefix("torch."))


def _demand_context(models: Sequence[ModelIdentity], settings: FitSettings) -> None:
    for model in models:
        if settings.length > model.rope.context:
            raise BadInput(
                f"--length {settings.length} exceeds the context of {model.name} ({model.rope.context})",
                f"use --length {model.rope.context} or less",
            )


def _describe(
    source: ModelIdentity,
    target: ModelIdentity,
    windows: CalibrationSet,
    settings: FitSettings,
    both: bool,
    options: Options,
) -> dict[str, Any]:
    """All that determines the result, by name."""
    return {
        **settings.describe(),
        "kvhub": kvhub.__version__,
        "source": f"{source.name} {source.digest}",
        "target": f"{target.name} {target.digest}",
        "both": both,
        "text": token_digest([list(windows.fit), windows.held_out, windows.tuning]),
        "texts": windows.dataset,
        "device": options.device.split(":")[0],
    }


def demand_writable(place: Path, option: str = "--output") -> None:
    """Refuse a place that cannot be a directory, early. Errors: `AccessDenied`, `BadInput`."""
    there = next(parent for parent in (place.absolute(), *place.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise BadInput(f"{option} {place}: {there} is a file, not a directory", f"give another {option}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise AccessDenied(f"{place} may not be written", f"give another {option}, or make it writable")


def _demand_free(place: Path, checkpoint: Checkpoint) -> None:
    """Refuse a place that is taken, unless this very fit wrote it before it was killed."""
    from kvhub.artifact.read import read_manifest
    from kvhub.errors import KvhubError

    if not (place.is_symlink() or place.exists()):
        return
    try:
        if read_manifest(place).created == checkpoint.created:
            return
    except KvhubError:
        pass
    raise BadInput(f"{place} exists already", "give another --output, or remove it")


def _sides(
    paths: tuple[Path, Path],
    identities: tuple[ModelIdentity, ModelIdentity],
    dtype: torch.dtype | None,
    settings: FitSettings,
    windows: CalibrationSet,
    options: Options,
    directory: Path,
    team: Workers,
) -> tuple[Side, Side]:
    from kvhub.model.load import load_model

    again = options.low_memory or settings.train is not None  # captures are read more than once
    root = options.captures or (directory / "captures" if again else None)
    keeps = None
    if isinstance(settings.train, Distill) and not (options.captures or options.low_memory):
        some = [*windows.fit[: settings.train.windows], *windows.tuning]
        keeps = {token_digest([window[None]]) for window in some}
    device = f"cuda:{team.rank % torch.cuda.device_count()}" if options.device == "cuda" else options.device
    sides = []
    for path, identity in zip(paths, identities, strict=True):
        store = CaptureStore(root, identity) if root else None
        if store and team.first:  # it removes what a killed writer left: not while others write
            store.prepare()
        sides.append(
            Side(
                identity,
                load=lambda path=path: load_model(path, dtype, device=device),  # type: ignore[misc]
                store=store,
                keep=not options.low_memory,
                keeps=None if keeps is None else lambda window: token_digest([window[None]]) in keeps,
                path=path,
            )
        )
    team.wait()
    return sides[0], sides[1]


def _plan(
    paths: tuple[Path, Path],
    sides: tuple[Side, Side],
    every: Sequence[torch.Tensor],
    fitted_on: int,
    settings: FitSettings,
    both: bool,
    options: Options,
    checkpoint: Checkpoint,
    team: Workers,
) -> tuple[Budget, int | None]:
    """What it will take, and the target layers at a time where not all fit; refuses what cannot.

    every: all windows, of which the first `fitted_on` are fitted on. The checkpoint keeps the decision:
    another one would round otherwise.
    """
    from kvhub.fit.footprint import footprint

    identities = sides[0].identity, sides[1].identity
    shapes = identities[0].geometry, identities[1].geometry
    models = tuple(footprint(path, one.dtype) for path, one in zip(paths, identities, strict=True))
    plan = budget(
        *shapes,
        settings,
        both=both,
        models=(models[0], models[1]),
        elsewhere=_elsewhere(options),
        itemsize=max(getattr(torch, one.dtype).itemsize for one in identities),
        windows=fitted_on,
        captured=(sides[0].captured(every), sides[1].captured(every)),
        low_memory=options.low_memory,
        held=held(),
    )
    free = free_memory()
    have = options.memory if options.memory is not None or free is None else free + plan.held
    kept = sides[0].complete and not settings.automatic and team.size == 1 and settings.recipe != "best"
    if kept and (checkpoint.layers or (have is not None and plan.total > have)):
        layers = checkpoint.layers or _block(sides, settings, both, (have or plan.total) - plan.held)
        if layers is not None:
            checkpoint.keep_layers(layers)
            pairs = (shapes, shapes[::-1])[: 1 + both]
            needed = max(block_bytes(*pair, settings, layers) for pair in pairs)
            return plan.in_blocks(needed), layers
    advice = "" if options.low_memory else "use --low-memory, or "
    one_way = "fit one direction at a time, or " if both else ""
    demand_memory(plan.total, hint=f"{one_way}{advice}use a machine with more memory", available=have)
    return plan, None


def _elsewhere(options: Options) -> int:
    """Bytes of weights that need no main memory: what the GPUs have free."""
    if options.device == "cpu" or not torch.cuda.is_available():
        return 0
    return sum(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))


def _block(sides: tuple[Side, Side], settings: FitSettings, both: bool, available: int) -> int | None:
    """Target layers at a time that fit in both directions."""
    found = [
        layers_at_once(one.identity.geometry, two.identity.geometry, settings, available)
        for one, two in (sides, sides[::-1])[: 1 + both]
    ]
    return None if None in found else min(size for size in found if size is not None)


def _progress(
    sides: tuple[Side, Side], settings: FitSettings, rows: int, both: bool, options: Options, team: Workers
) -> Progress | None:
    if options.progress is None or not team.first:
        return None
    shapes = sides[0].identity.geometry, sides[1].identity.geometry
    return Expected(
        options.progress,
        options.say,
        solve_seconds(*shapes, settings, both=both),
        choice_windows(*shapes, settings, both=both),
        distil_windows(settings, both=both),
        train_seconds(*shapes, settings, rows, both=both),
    )
