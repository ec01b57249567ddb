from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny
from torch import Tensor

from kvhub.artifact.write import write_artifact
from kvhub.errors import BadInput, Incompatible
from kvhub.fit.calibration import CalibrationSet, calibration_set, load_corpora, row_positions
from kvhub.fit.capture import capture
from kvhub.fit.ridge import Regularization
from kvhub.fit.run import Fitted, fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.mapper import Mapper
from kvhub.model.load import LoadedModel, load_model

LENGTH = 64


def tiny_pair(tmp_path: Path, **target: Any) -> tuple[LoadedModel, LoadedModel]:
    shape = {"layers": 4, "head_dim": 24, "hidden": 64, "seed": 1} | target
    return (
        load_model(make_tiny(tmp_path / "source"), torch.float32),
        load_model(make_tiny(tmp_path / "target", **shape), torch.float32),
    )


def text(tmp_path: Path, model: LoadedModel, sequences: int = 24) -> CalibrationSet:
    corpora = load_corpora([write_text(tmp_path / "text.txt", 400)])
    return calibration_set(corpora, model.tokenizer, sequences=sequences, length=LENGTH)


def settings(**changes: Any) -> FitSettings:
    given = {"k": 2, "sequences": 24, "length": LENGTH, "stride": 2, "store_dtype": "float32"}
    return FitSettings(**(given | {"created": "2026-01-01T00:00:00+00:00"} | changes))


def mean_kl(target: LoadedModel, cache: Any, ids: Tensor, prefix: int) -> float:
    """KL(native || mapped) of the target's next tokens after `prefix`, nats a token."""
    with torch.inference_mode():
        native = target.model(ids[None]).logits[0, prefix:].log_softmax(-1)
        mapped = target.model(ids[None, prefix:], past_key_values=cache).logits[0].log_softmax(-1)
    return float((native.exp() * (native - mapped)).sum(-1).mean())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2"])
def test_a_self_map_is_the_identity_end_to_end(tmp_path: Path, model_type: str) -> None:
    """fit -> artifact on disk -> Mapper -> the target goes on from the mapped cache."""
    model = load_model(make_tiny(tmp_path / "m", model_type=model_type), torch.float32)
    windows = text(tmp_path, model)
    (fitted,) = fit_pair(model, model, windows, settings(k=1, regularization=Regularization(1e-8)))
    assert fitted.manifest.source_layers == [[0], [1], [2]]
    assert min(fitted.manifest.fit_scores.r2_key + fitted.manifest.fit_scores.r2_value) > 0.9999
    write_artifact(tmp_path / "mapper", fitted.manifest, fitted.tensors)
    mapper = Mapper.from_pretrained(tmp_path / "mapper")
    ids = windows.held_out[0]
    with torch.inference_mode():
        cache = model.model(ids[None, :48], use_cache=True).past_key_values
    assert mean_kl(model, mapper.map(cache, source=model, target=model), ids, 48) < 1e-3


def test_a_linear_relation_between_two_models_is_recovered(tmp_path: Path) -> None:
    """The target is the source with a basis change in every value head, undone in the output projection."""
    source = load_model(make_tiny(tmp_path / "m"), torch.float32)
    path = make_tiny(tmp_path / "n")
    generator = torch.Generator().manual_seed(0)
    change = torch.eye(16).repeat(3, 2, 1, 1) + 0.3 * torch.randn(3, 2, 16, 16, generator=generator)
    changed = load_model(path, torch.float32)
    for number, layer in enumerate(changed.model.model.layers):
        value, out = layer.self_attn.v_proj.weight.data, layer.self_attn.o_proj.weight.data
        for head in range(2):
            value[16 * head : 16 * head + 16] = change[number, head].T @ value[16 * head : 16 * head + 16]
            for query in (2 * head, 2 * head + 1):  # the two query heads that read it
                here = slice(16 * query, 16 * query + 16)
                out[:, here] = out[:, here] @ torch.linalg.inv(change[number, head].T)
    changed.model.save_pretrained(path)
    target = load_model(path, torch.float32)
    windows = text(tmp_path, source)
    full, local = (
        fit_pair(
            source, target, windows, settings(k=1, regularization=Regularization(1e-9), support=support)
        )[0]
        for support in ("full", "head-local")
    )
    assert full.manifest.source_layers == local.manifest.source_layers == [[0], [1], [2]]
    for number in range(3):
        weight = full.tensors[f"layers.{number}.v.weight"].reshape(2, 16, 2, 16)
        for head in range(2):
            torch.testing.assert_close(weight[head, :, head], change[number, head], atol=2e-3, rtol=0)
            torch.testing.assert_close(weight[head, :, 1 - head], torch.zeros(16, 16), atol=2e-3, rtol=0)
        torch.testing.assert_close(
            local.tensors[f"layers.{number}.v.weight"], change[number], atol=2e-3, rtol=0
        )


def test_both_directions_from_one_capture_are_two_single_fits(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source)
    both = fit_pair(source, target, windows, settings(), both=True)
    single = [
        *fit_pair(source, target, windows, settings()),
        *fit_pair(target, source, windows, settings()),
    ]
    assert len(both) == 2
    for one, other in zip(both, single, strict=True):
        assert one.manifest.source == other.manifest.source
        assert one.manifest.source_layers == other.manifest.source_layers
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in one.tensors.items():
            torch.testing.assert_close(tensor, other.tensors[name], rtol=1e-5, atol=1e-6)
        found, expected = one.manifest.fit_scores, other.manifest.fit_scores
        assert found.r2_key == pytest.approx(expected.r2_key, abs=1e-5)
        assert found.r2_value == pytest.approx(expected.r2_value, abs=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_unequal_heads_and_head_sizes_fit_write_and_map(tmp_path: Path, kv_heads: int) -> None:
    source, target = tiny_pair(tmp_path, kv_heads=kv_heads)
    windows = text(tmp_path, source)
    for fitted in fit_pair(source, target, windows, settings(), both=True):
        directory = tmp_path / fitted.manifest.source.name
        here, there = (source, target) if fitted.manifest.source == source.identity else (target, source)
        write_artifact(directory / "mapper", fitted.manifest, fitted.tensors)
        with torch.inference_mode():
            cache = here.model(windows.held_out[0][None], use_cache=True).past_key_values
        mapped = Mapper.from_pretrained(directory / "mapper").map(cache, source=here, target=there)
        assert mapped.get_seq_length() == LENGTH
        shape = there.identity.geometry
        assert mapped.layers[0].keys.shape == (1, shape.num_kv_heads, LENGTH, shape.head_dim)
    with pytest.raises(Incompatible, match="equal KV head counts"):
        fit_pair(source, target, windows, settings(support="head-local"))


def test_held_out_r2_is_that_of_the_mapper_on_held_out_rows(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source)
    (fitted,) = fit_pair(source, target, windows, settings(store_dtype="bfloat16"))
    layers = fitted.manifest.source_layers
    for name, found in (("k", fitted.manifest.fit_scores.r2_key), ("v", fitted.manifest.fit_scores.r2_value)):
        assert fitted.tensors[f"layers.0.{name}.weight"].dtype == torch.bfloat16
        outputs, errors = [], []
        for window in windows.held_out:
            here, there = capture(source, window), capture(target, window)
            xs, ys = (here.content_keys, there.content_keys) if name == "k" else (here.values, there.values)
            x = torch.cat([xs[layer][::2].flatten(1) for layer in layers[1]], dim=1)
            bias = fitted.tensors[f"layers.1.{name}.bias"].flatten()
            outputs.append(ys[1][::2].flatten(1))
            errors.append(outputs[-1] - x @ fitted.tensors[f"layers.1.{name}.weight"].float() - bias)
        y, error = torch.cat(outputs).double(), torch.cat(errors).double()
        expected = 1 - error.square().sum() / (y - y.mean(0)).square().sum()
        assert found[1] == pytest.approx(float(expected), abs=1e-4)
    assert fitted.manifest.fit_scores.rows == len(windows.held_out) * LENGTH // 2


def test_exact_prefix_leaves_the_first_positions_out(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source)
    (plain,) = fit_pair(source, target, windows, settings())
    (without,) = fit_pair(source, target, windows, settings(exact_prefix=5))
    assert without.manifest.exact_prefix == 5
    assert without.manifest.calibration.rows == len(windows.fit) * len(range(6, LENGTH, 2))
    assert not torch.equal(plain.tensors["layers.0.v.weight"], without.tensors["layers.0.v.weight"])
    # What is left out has no influence at all: the same moments from the rows after it.
    rows = row_positions(LENGTH, 2, 5)
    captures = [(capture(source, w).rows(rows), capture(target, w).rows(rows)) for w in windows.fit]
    y = torch.cat([there[1] for _, there in captures])[:, : target.identity.geometry.features]
    x = torch.cat([here[1] for here, _ in captures])
    wide = source.identity.geometry.features
    chosen = torch.cat([x[:, s * wide : (s + 1) * wide] for s in without.manifest.source_layers[0]], dim=1)
    centred = chosen - chosen.mean(0)
    gram = centred.T @ centred
    gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    expected = torch.linalg.solve(gram, centred.T @ (y - y.mean(0)))
    torch.testing.assert_close(without.tensors["layers.0.v.weight"], expected.float(), rtol=1e-4, atol=1e-5)


def test_the_default_recipe_weighs_the_first_row_of_a_pair_with_a_sink(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source, sequences=8)
    assert isinstance(windows.fit, Tensor)
    begun = windows.fit.clone()
    begun[:, 0] = 3  # one token begins every window, and no key is like its own
    found = {}
    for name, fit, asked in (("none", windows.fit, 0), ("sink", begun, 0), ("once", begun, 1)):
        changes = {"k": 1, "sequences": 8, "recipe": "default", "first_weight": asked}
        (found[name],) = fit_pair(source, target, replace(windows, fit=fit), settings(**changes))
    said = [str(fitted.manifest.recipe).split(",")[0] for fitted in found.values()]
    assert said == [f"default: first row x{weight}" for weight in (1, 64, 1)]
    assert not torch.equal(
        found["sink"].tensors["layers.1.k.weight"], found["once"].tensors["layers.1.k.weight"]
    )


def test_the_same_text_gives_the_same_digest(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source)

    def written(name: str, **changes: Any) -> str:
        (fitted,) = fit_pair(source, target, windows, settings(**changes))
        return write_artifact(tmp_path / name, fitted.manifest, fitted.tensors).digest

    assert written("a") == written("b") != written("c", created=None)


def test_progress_reaches_the_end_of_every_stage(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source)
    last: dict[str, tuple[int, int]] = {}
    steps: list[tuple[str, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        last[stage] = done, total
        steps.append((stage, done))

    fit_pair(source, target, windows, settings(), both=True, progress=progress)
    held_out = len(windows.held_out)
    assert last == {"capture": (24, 24), "solve": (7, 7), "score": (held_out, held_out)}
    assert len(set(steps)) == len(steps)


def test_too_few_rows_says_how_many_are_needed(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path)
    windows = text(tmp_path, source, sequences=2)
    with pytest.raises(BadInput, match=r"gives 64 rows and k = 2 needs at least 65 \(192 tokens"):
        fit_pair(source, target, windows, settings(sequences=2))
    fitted: list[Fitted] = fit_pair(source, target, windows, settings(k=1))
    assert len(fitted) == 1
    with pytest.raises(BadInput, match=r"outside 1\.\.3"):
        fit_pair(source, target, windows, settings(k=4))


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    source, target = tiny_pair(tmp_path, vocab=300)
    with pytest.raises(Incompatible, match="different vocabularies"):
        fit_pair(source, target, text(tmp_path, source), settings())
