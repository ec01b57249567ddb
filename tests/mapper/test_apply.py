"""`Mapper.map` on live models: what it gives, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from support.mappers import identity_tensors, make_manifest, random_tensors
from support.tiny import LLAMA3, make_tiny
from transformers import DynamicCache

from kvhub.artifact.write import write_artifact
from kvhub.errors import BadInput, Incompatible, NotFound
from kvhub.mapper import Mapper
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import load_model

TOKENS = torch.tensor([[5, 17, 300, 42, 8, 99, 256, 11, 7, 21, 64, 3]])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_model(make_tiny(tmp_path_factory.mktemp("m") / "small"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("m") / "large"
    return load_model(
        make_tiny(
            path,
            model_type="llama",
            layers=4,
            kv_heads=4,
            heads=8,
            head_dim=8,
            rope_parameters=LLAMA3,
            seed=1,
        )
    )


def prefill(loaded, tokens):
    with torch.no_grad():
        return loaded.model(tokens, use_cache=True).past_key_values


def self_mapper(loaded, **changes):
    layers = [[t] for t in range(loaded.identity.geometry.num_layers)]
    manifest = make_manifest(loaded.identity, loaded.identity, source_layers=layers, **changes)
    return RidgeMapper(manifest, identity_tensors(manifest))


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("model", ["small", "large"])
def test_the_identity_map_gives_the_cache_back(request, model, support):
    loaded = request.getfixturevalue(model)
    mapper = self_mapper(loaded, support=support)
    cache = prefill(loaded, TOKENS)
    mapped = mapper.map(cache, source=loaded, target=loaded.identity)
    assert isinstance(mapped, DynamicCache)
    assert mapped.get_seq_length() == TOKENS.shape[1]
    for have, want in zip(mapped.layers, cache.layers, strict=True):
        torch.testing.assert_close(have.keys, want.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(have.values, want.values, rtol=0, atol=1e-5)


def test_the_target_continues_on_a_mapped_cache(small):
    """A self-map, then the last token: the logits are those of a prefill of everything."""
    mapped = self_mapper(small).map(prefill(small, TOKENS[:, :-1]), source=small, target=small)
    with torch.no_grad():
        continued = small.model(TOKENS[:, -1:], past_key_values=mapped).logits[0, -1]
        whole = small.model(TOKENS).logits[0, -1]
    torch.testing.assert_close(continued, whole, rtol=0, atol=1e-4)


def test_unequal_shapes_and_batches(small, large):
    manifest = make_manifest(small.identity, large.identity, k=2)
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    both = torch.cat([TOKENS, TOKENS.flip(1)])
    mapped = mapper.map(prefill(small, both), source=small, target=large)
    assert len(mapped.layers) == 4
    assert tuple(mapped.layers[0].keys.shape) == (2, 4, TOKENS.shape[1], 8)
    for row in (0, 1):
        alone = mapper.map(prefill(small, both[row : row + 1]), source=small, target=large)
        for have, want in zip(mapped.layers, alone.layers, strict=True):
            torch.testing.assert_close(have.keys[row], want.keys[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(have.values[row], want.values[0], rtol=1e-4, atol=1e-4)


def test_true_positions_matter(small):
    """A suffix mapped at its own positions equals the tail of the whole, and not at others."""
    mapper = self_mapper(small)
    cache = prefill(small, TOKENS)
    tail = DynamicCache()
    for index, layer in enumerate(cache.layers):
        tail.update(layer.keys[:, :, 4:], layer.values[:, :, 4:], index)
    manifest = make_manifest(small.identity, small.identity, k=2)
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    whole = mapper.map(cache, source=small, target=small).layers[0].keys[:, :, 4:]
    right = mapper.map(tail, source=small, target=small, positions=torch.arange(4, 12)).layers[0].keys
    wrong = mapper.map(tail, source=small, target=small).layers[0].keys
    torch.testing.assert_close(right, whole, rtol=1e-4, atol=1e-3)
    assert (wrong - whole).abs().max() > 0.1
    for bad in (torch.arange(7), torch.arange(8) - 1, torch.arange(8.0)):
        with pytest.raises(BadInput, match="positions"):
            mapper.map(tail, source=small, target=small, positions=bad)


def test_bfloat16_models_keep_their_dtype(tmp_path):
    loaded = load_model(make_tiny(tmp_path / "m"), torch.bfloat16)
    cache = prefill(loaded, TOKENS)
    mapped = self_mapper(loaded).map(cache, source=loaded, target=loaded)
    for have, want in zip(mapped.layers, cache.layers, strict=True):
        assert have.keys.dtype == torch.bfloat16
        # Strip and apply in float32 from the same bfloat16 row: at most a rounding of the last bit.
        torch.testing.assert_close(have.keys, want.keys, rtol=2**-7, atol=2**-8)
        assert torch.equal(have.values, want.values)


def test_exact_prefix(small, large):
    manifest = make_manifest(small.identity, large.identity, k=2, exact_prefix=4)
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    cache = prefill(small, TOKENS)
    with pytest.raises(BadInput, match="first 4 tokens"):
        mapper.map(cache, source=small, target=large)
    with pytest.raises(BadInput, match="4 to 12 tokens"):
        mapper.map(cache, source=small, target=large, native=prefill(large, TOKENS[:, :3]))
    native = prefill(large, TOKENS[:, :5])
    mapped = mapper.map(cache, source=small, target=large, native=native)
    for have, held in zip(mapped.layers, native.layers, strict=True):
        assert torch.equal(have.keys[:, :, :5], held.keys)
        assert torch.equal(have.values[:, :, :5], held.values)
        assert (have.keys[:, :, 5:] != 0).all()
    assert mapped.get_seq_length() == TOKENS.shape[1]


def test_a_wrong_pair_is_refused(small, large):
    manifest = make_manifest(small.identity, large.identity, k=2)
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    cache = prefill(small, TOKENS)
    other = small.identity.model_copy(update={"revision": "commit:" + "9" * 40})
    renamed = small.identity.model_copy(update={"name": "somebody/else"})
    mapper.map(cache, source=renamed, target=large)
    cases = [
        (large, small, "source_identity"),
        (other, large, "source_identity"),
        (small, other, "target_identity"),
    ]
    for source, target, code in cases:
        with pytest.raises(Incompatible) as caught:
            mapper.map(cache, source=source, target=target)
        assert caught.value.code == code
    drifted = small.identity.rope.model_copy(
        update={"inverse_frequencies": [f * 1.001 for f in small.identity.rope.inverse_frequencies]}
    )
    with pytest.raises(Incompatible, match="frequencies"):
        mapper.map(cache, source=small.identity.model_copy(update={"rope": drifted}), target=large)


def broken(cache, how):
    cache = copy.deepcopy(cache)
    layer = cache.layers[1]
    if how == "nan key":
        layer.keys[0, 0, 3, 2] = float("nan")
    elif how == "infinite value":
        layer.values[0, 1, 0, 0] = float("inf")
    elif how == "half":
        layer.values = layer.values.half()
    elif how == "ragged":
        layer.keys = layer.keys[:, :, :-1]
    elif how == "heads":
        layer.keys = layer.keys[:, :1]
    elif how == "layers":
        cache.layers.pop()
    elif how == "no tokens":
        for item in cache.layers:
            item.keys, item.values = item.keys[:, :, :0], item.values[:, :, :0]
    return DynamicCache() if how == "fresh" else cache


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("nan key", BadInput),
        ("infinite value", BadInput),
        ("no tokens", BadInput),
        ("half", Incompatible),
        ("ragged", Incompatible),
        ("heads", Incompatible),
        ("layers", Incompatible),
        ("fresh", Incompatible),
    ],
)
def test_a_cache_that_is_not_the_sources(small, how, kind):
    with pytest.raises(kind) as caught:
        self_mapper(small).map(broken(prefill(small, TOKENS), how), source=small, target=small)
    assert "\n" not in caught.value.message
    if kind is Incompatible:
        assert caught.value.code == "geometry"


def test_not_a_cache(small):
    with pytest.raises(BadInput, match="not a transformers Cache"):
        self_mapper(small).map([(torch.zeros(1), torch.zeros(1))], source=small, target=small)


def test_from_pretrained(small, large, tmp_path):
    manifest = make_manifest(small.identity, large.identity, k=2)
    written = write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    loaded = Mapper.from_pretrained(tmp_path / "m")
    assert loaded.manifest.digest == written.digest
    cache = prefill(small, TOKENS)
    again = RidgeMapper(manifest, random_tensors(manifest)).map(cache, source=small, target=large)
    for have, want in zip(loaded.map(cache, source=small, target=large).layers, again.layers, strict=True):
        assert torch.equal(have.keys, want.keys)
    with pytest.raises(BadInput, match="no revision"):
        Mapper.from_pretrained(tmp_path / "m", revision="main")
    with pytest.raises(NotFound):
        Mapper.from_pretrained(str(tmp_path / "absent" / "deeper"))
