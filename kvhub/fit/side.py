"""One model of a pair as a fit sees it: loaded, loaded when needed, or only its captures on disk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.errors import Incompatible
from kvhub.fit.capture import Capture, capture
from kvhub.fit.captures import CaptureStore
from kvhub.model.identity import ModelIdentity
from kvhub.model.k_norm import k_norm_weights

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


class Side:
    """Source or target. `capture` gives the same bits wherever they come from."""

    def __init__(
        self,
        identity: ModelIdentity,
        *,
        model: LoadedModel | None = None,
        load: Callable[[], LoadedModel] | None = None,
        store: CaptureStore | None = None,
        keep: bool = True,
        keeps: Callable[[Tensor], bool] | None = None,
        path: Path | None = None,
    ) -> None:
        """model: loaded, and stays; or load: how to load it when it is first needed.

        keep: once loaded it stays until `release`; else it is gone where `live` ends. keeps: which windows'
        captures are put into the store; None: all. path: the model's directory.
        """
        self.identity = identity
        self.store = store
        self.path = path
        self._model = model
        self._load = load
        self._keep = keep
        self._keeps = keeps

    @classmethod
    def of(cls, model: LoadedModel, store: CaptureStore | None = None) -> Side:
        """A model that is loaded."""
        return cls(model.identity, model=model, store=store, path=model.path)

    @cached_property
    def k_norm(self) -> Tensor:
        """The weights of the model's k_norm (`k_norm_weights`), read once."""
        assert self.path is not None
        return k_norm_weights(self.path, self.identity)

    @property
    def complete(self) -> bool:
        """Whether every capture is kept on disk."""
        return self.store is not None and self._keeps is None

    def captured(self, windows: Sequence[Tensor]) -> bool:
        """Whether the captures of all `windows` are on disk now; none of them is read."""
        return self.store is not None and self.complete and not self.store.bytes_missing(windows)

    def keeps(self, window: Tensor) -> bool:
        """Whether the capture of `window` is kept on disk."""
        return self.store is not None and (self._keeps is None or self._keeps(window))

    @property
    def resident(self) -> bool:
        """Whether the model is in memory now."""
        return self._model is not None

    @contextmanager
    def live(self) -> Iterator[LoadedModel]:
        """The loaded model. Errors: those of loading; `Incompatible` where another model was loaded."""
        if self._model is not None:
            yield self._model
            return
        assert self._load is not None
        self._model = self._load()
        if self._model.identity != self.identity:
            raise Incompatible(
                f"the model {self.identity.name} changed while it was read", "start again", code="changed"
            )
        try:
            yield self._model
        finally:
            if not self._keep:
                self.release()

    def release(self) -> None:
        """Free the model, where it can be loaded again."""
        if self._load is not None:
            self._model = None
            gc.collect()

    def fill(self, windows: Sequence[Tensor], done: Callable[[int], None]) -> None:
        """Put the captures of all windows on disk, with the model in memory for that long.

        Those that are there are read once, so that a damaged one is made again.
        """
        assert self.store is not None
        missing = [self.store.get(window) is None for window in windows]
        with self.live() if any(missing) else nullcontext():
            for number, window in enumerate(windows, 1):
                if missing[number - 1]:
                    self.capture(window)
                done(number)

    def capture(self, window: Tensor) -> Capture:
        """The capture of `window`, from disk where it is kept, else by a forward (and then kept)."""
        keeps = self.keeps(window)
        found = self.store.get(window) if self.store and keeps else None
        if found is None:
            with self.live() as model:
                found = capture(model, window)
            if self.store and keeps:
                self.store.put(window, found)
        return found
