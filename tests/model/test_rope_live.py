"""Every kind of RoPE against the cache of a live model: near, far out, and through a mapper."""

from __future__ import annotations

import pytest
import torch
from support.mappers import identity_tensors, make_manifest
from support.ropes import LONGROPE, ROPES, THETA, YARN, make_rope

from kvhub.errors import Incompatible
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.config import ARCHITECTURES
from kvhub.model.identify import identify
from kvhub.model.identity import RopeSpec
from kvhub.model.load import load_model
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import apply_rope, strip_rope

POSITIONS = torch.tensor([*range(8), 255, 256, 257, 1000, 4095, 4096, 8191, *range(32760, 32768)])
PLAIN = RopeSpec(
    rope_type="default",
    rotary_dim=16,
    pairing="half",
    attention_factor=1.0,
    inverse_frequencies=(1.0 / THETA ** (torch.arange(0, 16, 2) / 16)).tolist(),
    parameters={"rope_theta": THETA},
    max_position=4096,
)


@pytest.fixture(scope="module", params=ROPES)
def case(request, tmp_path_factory):
    return request.param, load_model(make_rope(tmp_path_factory.mktemp("rope") / "m", request.param))


def cached(loaded, positions=POSITIONS):
    """The cache of a forward at `positions`, and each layer's keys before RoPE, read with hooks."""
    content, handles, shape = [], [], loaded.identity.geometry

    def keep(keys):
        content.append(keys[0].reshape(len(positions), shape.num_kv_heads, shape.head_dim).clone())

    for layer in loaded.model.model.layers:
        attention = layer.self_attn
        start = shape.num_attention_heads * shape.head_dim
        if hasattr(attention, "qkv_proj"):
            part = slice(start, start + shape.features)
            hook = attention.qkv_proj.register_forward_hook(lambda m, i, out, p=part: keep(out[..., p]))
        else:
            last = attention.k_norm if shape.k_norm else attention.k_proj
            hook = last.register_forward_hook(lambda m, i, out: keep(out))
        handles.append(hook)
    ids = torch.randint(1, 250, (1, len(positions)), generator=torch.Generator().manual_seed(2))
    try:
        with torch.no_grad():
            cache = loaded.model(ids, position_ids=positions[None], use_cache=True).past_key_values
    finally:
        for handle in handles:
            handle.remove()
    return cache, content


def test_every_model_type_has_a_case():
    assert {options.get("model_type", "qwen3") for options in ROPES.values()} == set(ARCHITECTURES)


def test_strip_and_apply_against_the_models_own_attention(case):
    _, loaded = case
    rope = loaded.identity.rope
    table = rotary_table(rope, POSITIONS)
    cache, content = cached(loaded)
    plain = rotary_table(PLAIN, POSITIONS)
    for layer, before in zip(cache.layers, content, strict=True):
        after = layer.keys[0].transpose(0, 1)
        size = before.abs().max()
        torch.testing.assert_close(strip_rope(after, table), before, rtol=0, atol=float(2e-6 * size))
        torch.testing.assert_close(apply_rope(before, table), after, rtol=0, atol=float(2e-6 * size))
        if rope.parameters != PLAIN.parameters and rope.rope_type != "dynamic":
            # Plain RoPE in its place would be far off: what is tested here is not the default once more.
            assert (strip_rope(after, plain) - before).abs().max() > 0.1 * size


def test_identity_mapper_gives_the_native_cache(case):
    _, loaded = case
    layers = [[layer] for layer in range(loaded.identity.geometry.num_layers)]
    manifest = make_manifest(loaded.identity, loaded.identity, source_layers=layers)
    mapper = RidgeMapper(manifest, identity_tensors(manifest))
    cache, _ = cached(loaded)
    mapped = mapper.map(cache, source=loaded, target=loaded, positions=POSITIONS)
    for found, native in zip(mapped.layers, cache.layers, strict=True):
        torch.testing.assert_close(found.keys, native.keys, rtol=0, atol=1e-5)
        torch.testing.assert_close(found.values, native.values, rtol=0, atol=1e-5)


def test_files_alone_say_the_same(case):
    _, loaded = case
    found = identify(loaded.path, dtype="float32")
    assert found == loaded.identity
    again = type(found).model_validate_json(found.model_dump_json())
    assert again.digest == found.digest


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_beyond_the_limit(tmp_path, name):
    """Where the angles of a cached key depend on the length it was cached at: exact below, refused beyond."""
    longrope = {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 64}}
    more = longrope if name == "longrope" else {"max_position_embeddings": 65}
    loaded = load_model(make_rope(tmp_path / "m", name, **more))
    rope = loaded.identity.rope
    assert rope.limit == rope.context == 64
    below, beyond = torch.arange(64), torch.arange(96)

    cached(loaded, beyond)  # a long sequence before leaves no trace in a short one
    cache, content = cached(loaded, below)
    after = cache.layers[0].keys[0].transpose(0, 1)
    torch.testing.assert_close(strip_rope(after, rotary_table(rope, below)), content[0], rtol=0, atol=1e-5)

    cache, content = cached(loaded, beyond)
    after = cache.layers[0].keys[0, :, :64].transpose(0, 1)
    wrong = strip_rope(after, rotary_table(rope, below))
    assert (wrong - content[0][:64]).abs().max() > 0.05  # the refusal is needed: these rows are others

    manifest = make_manifest(loaded.identity, loaded.identity, source_layers=[[0], [1], [2]])
    mapper = RidgeMapper(manifest, identity_tensors(manifest))
    with pytest.raises(Incompatible) as caught:
        mapper.map(cache, source=loaded, target=loaded)
    assert caught.value.code == "rope_length"
    assert str(64) in caught.value.message


def test_longrope_with_one_list_has_no_limit(tmp_path):
    one = LONGROPE | {"long_factor": LONGROPE["short_factor"], "original_max_position_embeddings": 64}
    loaded = load_model(make_rope(tmp_path / "m", "longrope", rope_parameters=one))
    assert loaded.identity.rope.limit is None
    cache, content = cached(loaded)
    table = rotary_table(loaded.identity.rope, POSITIONS)
    after = cache.layers[0].keys[0].transpose(0, 1)
    torch.testing.assert_close(strip_rope(after, table), content[0], rtol=0, atol=1e-5)


def squared_scale(rotary):
    rotary.attention_scaling **= 2


def plain_frequencies(rotary):
    rotary.inv_freq.copy_(torch.tensor(PLAIN.inverse_frequencies))


def scale_in_forward(rotary):
    forward = rotary.forward
    rotary.forward = lambda x, ids: tuple(part / rotary.attention_scaling for part in forward(x, ids))


def wrapped_positions(rotary):
    forward = rotary.forward
    rotary.forward = lambda x, ids: forward(x, ids % 256)  # as if it stopped at the original context


@pytest.mark.parametrize("fault", [squared_scale, plain_frequencies, scale_in_forward, wrapped_positions])
def test_a_live_module_that_turns_otherwise_is_refused(tmp_path, fault):
    loaded = load_model(make_rope(tmp_path / "m", "yarn"))
    fault(loaded.model.model.rotary_emb)
    with pytest.raises(Incompatible) as caught:
        identify(loaded.path, dtype="float32", model=loaded.model)
    assert caught.value.code == "rope_live"


def test_a_live_module_with_another_pairing_is_refused(tmp_path, monkeypatch):
    from transformers.models.glm import modeling_glm
    from transformers.models.llama.modeling_llama import rotate_half

    loaded = load_model(make_rope(tmp_path / "m", "glm partial interleaved"))
    monkeypatch.setattr(modeling_glm, "rotate_half", rotate_half)
    with pytest.raises(Incompatible) as caught:
        identify(loaded.path, dtype="float32", model=loaded.model)
    assert caught.value.code == "rope_live"


def test_yarn_scale_is_part_of_the_identity(tmp_path):
    one = identify(make_rope(tmp_path / "a", "yarn"), dtype="float32")
    other = identify(
        make_rope(tmp_path / "b", "yarn", rope_parameters=YARN | {"attention_factor": 1.0}), dtype="float32"
    )
    assert one.rope.attention_factor == pytest.approx(1.13863, abs=1e-5)
    assert one.digest != other.digest

    def scaled(by):  # the factor alone: a given one is among the parameters too
        rope = one.rope.model_copy(update={"attention_factor": one.rope.attention_factor * by})
        return one.model_copy(update={"rope": rope})

    assert scaled(1 + 2e-16).digest == one.digest
    assert len({one.digest, scaled(1.0001).digest, scaled(1 / one.rope.attention_factor).digest}) == 3
