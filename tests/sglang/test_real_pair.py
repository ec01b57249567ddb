"""On the shipped pair, in one process: the pool holds what `mapper.map` gives for the source's own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pools import Engine

from kvhub.fit.calibration import calibration_set, load_corpora
from kvhub.fit.run import fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import LoadedModel, load_model

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "demo" / "text" / "wikipedia.txt"


class RealEngine(Engine):
    """An engine whose forward is the transformers model (SGLang's rows are bit-equal to its cache)."""

    loaded: LoadedModel

    def native(self, tokens: list[int], positions: range) -> torch.Tensor:
        with torch.no_grad():
            cache = self.loaded.model(
                torch.tensor([tokens[: positions.stop]]), use_cache=True
            ).past_key_values
        rows = torch.stack(
            [torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in cache.layers]
        )
        return rows[:, :, positions.start :]


@pytest.fixture(scope="module")
def pair() -> tuple[LoadedModel, LoadedModel]:
    torch.set_num_threads(1)
    return tuple(load_model(ROOT / "models" / name, torch.float32) for name in ("small", "large"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def mapper(pair: tuple[LoadedModel, LoadedModel]) -> RidgeMapper:
    source, target = pair
    text = calibration_set(load_corpora([TEXT]), source.tokenizer, sequences=12, length=128)
    [fitted] = fit_pair(source, target, text, FitSettings(k=2, stride=1, support="head-local"))
    return RidgeMapper(fitted.manifest, fitted.tensors)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_pool_holds_the_mapped_cache(
    tmp_path: Path, pair: tuple[LoadedModel, LoadedModel], mapper: RidgeMapper, page_size: int
) -> None:
    source, target = pair
    tokens = source.tokenizer(TEXT.read_text()[3000:6000])["input_ids"][:210]
    root = tmp_path / "exchange"
    small = RealEngine(source.identity, root, page_size=page_size)
    small.loaded = source
    large = RealEngine(target.identity, root, (mapper,), page_size=page_size)
    large.loaded = target
    small.run(tokens, 1)
    running = large.admit(large.request([*tokens, 5], ask={"reuse": True}))
    assert running.meta["mapped"] == 192
    with torch.no_grad():
        cache = source.model(torch.tensor([tokens[:192]]), use_cache=True).past_key_values
    mapped = mapper.map(cache, source=source, target=target)
    expected = torch.stack(
        [torch.stack((layer.keys[0], layer.values[0])).transpose(1, 2) for layer in mapped.layers]
    )
    native = large.native(tokens, range(192))
    found = large.row(running, 192)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (found - native).abs().max() > 0.1  # so that the comparison means something
    large.drop(running)
    large.empty()
