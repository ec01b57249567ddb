"""`diagnose` on tiny models, against the evaluation's own numbers and the library's own regression."""

import json

import numpy as np
import pytest
import torch
from support.eval_pair import AffineMapper, RandomMapper, sampled_windows, tiny

from kvhub.artifact.layout import BESIDE
from kvhub.diagnostics.attention import attention_weights
from kvhub.diagnostics.by_k import r2_by_k
from kvhub.diagnostics.key_concentration import key_error_concentration
from kvhub.diagnostics.maps import PairRows, r2_maps
from kvhub.diagnostics.observe import observe
from kvhub.diagnostics.record import NAME, read_diagnostics, write_diagnostics
from kvhub.diagnostics.run import diagnose
from kvhub.diagnostics.value_concentration import value_error_concentration
from kvhub.diagnostics.window import diagnose_window
from kvhub.errors import BadInput, Corrupt, Incompatible, NotFound
from kvhub.evaluation.inject import KvRows
from kvhub.evaluation.run import EvalSettings, evaluate

TAIL = 9


@pytest.fixture(scope="module")
def pair():
    return tiny(7, family="llama"), tiny(1)


@pytest.fixture(scope="module")
def domains(pair):
    return {"one": sampled_windows(pair[1], 4, 33, seed=1), "two": sampled_windows(pair[1], 3, 33, seed=2)}


@pytest.fixture(scope="module")
def found(pair, domains):
    return diagnose(AffineMapper(*pair, 0.9, 0.1), *pair, domains, tail=TAIL, resamples=100)


def test_agrees_with_the_evaluation(pair, domains, found):
    evidence = evaluate(AffineMapper(*pair, 0.9, 0.1), *pair, domains, EvalSettings(tail=TAIL, resamples=100))
    assert found.text == evidence.text and found.windows == 7
    for metric in ("attention_cosine", "attention_cosine_worst"):
        for domain in ("one", "two", "all"):
            ours, theirs = found.score(metric, domain), evidence.score(metric, "mapped", domain)
            assert ours.value == pytest.approx(theirs.value, abs=1e-6), (metric, domain)
            assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert [len(layer.attention_cosine) for layer in found.layers] == [4, 4]
    assert {p.domain for p in found.positions} == {"one", "two"}
    assert all(len(p.key) == len(p.value) == 24 for p in found.positions)


def test_scores_follow_from_the_layers(found):
    for metric, values in (
        ("attention_cosine", [np.mean(layer.attention_cosine) for layer in found.layers]),
        ("k_error_concentration", [np.mean(layer.key_concentration) for layer in found.layers]),
        ("v_error_concentration", [np.mean(layer.value_concentration) for layer in found.layers]),
        ("residual_error", [layer.residual_error for layer in found.layers]),
    ):
        score = found.score(metric)
        assert score.value == pytest.approx(np.mean(values)), metric
        assert score.low <= score.value <= score.high
    worst = min(np.mean(layer.attention_cosine) for layer in found.layers)
    assert found.score("attention_cosine_worst").value == pytest.approx(worst)


def test_identity_errs_nowhere_and_noise_everywhere(pair, domains):
    model = pair[1]
    exact = diagnose(AffineMapper(model, model), model, model, domains, tail=TAIL, maps=False)
    assert exact.score("attention_cosine").value == pytest.approx(1, abs=1e-4)
    assert exact.score("residual_error").value == pytest.approx(0, abs=1e-6)
    assert exact.score("key_error").value == pytest.approx(0, abs=1e-6)
    assert exact.maps is None and exact.by_k == []
    noise = diagnose(RandomMapper(model, model), model, model, domains, tail=TAIL, maps=False)
    assert noise.score("attention_cosine").value < 0.5
    assert noise.score("key_error").value > 0.5
    for metric in ("residual_error", "output_error", "attention_kl"):
        assert noise.score(metric).value > 100 * max(exact.score(metric).value, 1e-6), metric


def test_an_exact_prefix_is_served_as_native(pair, domains):
    source, target = pair
    some = diagnose(AffineMapper(source, target, exact_prefix=5), *pair, domains, tail=TAIL, maps=False)
    for profile in some.positions:
        assert profile.key[:5] == pytest.approx([0] * 5, abs=1e-6)
        assert min(profile.key[5:]) > 1e-3
    assert some.score("key_error_first").value == pytest.approx(0, abs=1e-6)


def test_r2_maps_against_plain_least_squares(pair, domains):
    source, target = pair
    windows = [observe(source, target, window, TAIL) for window in domains["one"]]
    shapes = source.identity.geometry, target.identity.geometry
    maps = r2_maps(windows, *shapes, source.identity.rope)
    for name, rows in (("raw_key", "keys"), ("value", "values")):
        x = np.concatenate([getattr(seen.source, rows)[1].double().numpy() for seen in windows])
        y = np.concatenate([getattr(seen.prefix, rows)[0].double().numpy() for seen in windows])
        r2 = []
        for head in range(2):
            inputs = np.concatenate((x[:, head], np.ones((len(x), 1))), 1)
            fit = inputs @ np.linalg.lstsq(inputs, y[:, head], rcond=None)[0]
            spread = ((y[:, head] - y[:, head].mean(0)) ** 2).sum()
            r2.append(1 - ((y[:, head] - fit) ** 2).sum() / spread)
        assert float(getattr(maps, name)[0, 1]) == pytest.approx(np.mean(r2), abs=1e-6), name
    assert not torch.allclose(maps.raw_key, maps.content_key, atol=1e-3)


def test_r2_by_k_against_plain_ridge(pair, domains):
    source, target = pair
    shapes = source.identity.geometry, target.identity.geometry
    halves = [PairRows(*shapes), PairRows(*shapes)]
    seen = [observe(source, target, window, TAIL) for windows in domains.values() for window in windows]
    for number, one in enumerate(seen):
        halves[number % 2].add(one, source.identity.rope)
    points = r2_by_k(*halves)
    assert [point.k for point in points] == [1]  # 96 rows; k = 2 has 64 features and asks for 128
    expected = []
    for layer in range(2):
        scores = []
        for of in range(2):  # the selected layer is not told: R2 must be one of the two
            data = []
            for part in (seen[0::2], seen[1::2]):
                x = np.concatenate([one.source.values[of].double().flatten(1).numpy() for one in part])
                y = np.concatenate([one.prefix.values[layer].double().flatten(1).numpy() for one in part])
                data.append((x, y))
            (x, y), (x2, y2) = data
            mean_x, mean_y = x.mean(0), y.mean(0)
            gram = (x - mean_x).T @ (x - mean_x)
            gram += 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram))
            weight = np.linalg.solve(gram, (x - mean_x).T @ (y - mean_y))
            residual = y2 - (x2 - mean_x) @ weight - mean_y
            scores.append(1 - (residual**2).sum() / ((y2 - y2.mean(0)) ** 2).sum())
        expected.append(scores)
    possible = {round((a + b) / 2, 6) for a in expected[0] for b in expected[1]}
    assert round(points[0].r2_value, 6) in possible


def test_the_record_is_kept_and_checked(tmp_path, pair, found):
    manifest = AffineMapper(*pair, 0.9, 0.1).manifest
    directory = tmp_path / "mapper"
    assert read_diagnostics(directory, manifest) is None
    with pytest.raises(NotFound):
        write_diagnostics(directory, found)
    directory.mkdir()
    path = write_diagnostics(directory, found)
    assert path == directory / NAME and NAME.split("/")[0] in BESIDE
    assert read_diagnostics(directory, manifest) == found
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mapper"]
    other = manifest.model_copy(update={"k": 2})
    with pytest.raises(Corrupt, match="another mapper"):
        read_diagnostics(directory, other)
    content = json.loads(path.read_text())
    for change, error in (
        ({"schema_version": 2}, Incompatible),
        ({"windows": "7"}, Corrupt),
        ({"extra": 1}, Corrupt),
        ({"scores": content["scores"] + content["scores"][:1]}, Corrupt),
        ({"maps": content["maps"] | {"value": [[1.0]]}}, Corrupt),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(error):
            read_diagnostics(directory, manifest)


def test_unusable_windows_are_refused(pair, domains):
    mapper = AffineMapper(*pair, exact_prefix=24)
    with pytest.raises(BadInput, match="exact prefix"):
        diagnose(mapper, *pair, domains, tail=TAIL)
    with pytest.raises(BadInput, match="no prefix"):
        diagnose(AffineMapper(*pair), *pair, domains, tail=33)
    with pytest.raises(BadInput):
        diagnose(AffineMapper(*pair), *pair, {}, tail=TAIL)
    with pytest.raises(Incompatible):
        diagnose(AffineMapper(*pair), pair[1], pair[1], domains, tail=TAIL)


def test_each_formula_is_given_what_its_definition_names(pair, domains):
    """Concentrations of cached keys by the target's queries, and of values by its *native* weights."""
    seen = observe(*pair, domains["one"][0], TAIL)
    drawn = torch.Generator().manual_seed(3)
    noisy = [
        tuple(row + torch.randn(row.shape, generator=drawn) for row in rows)
        for rows in (seen.prefix.keys, seen.prefix.values)
    ]
    found = diagnose_window(seen, KvRows(*noisy))
    for layer, (query, scaling) in enumerate(zip(seen.queries, seen.scaling, strict=True)):
        key, value = seen.prefix.keys[layer], seen.prefix.values[layer]
        expected = key_error_concentration(query, key, noisy[0][layer])
        assert found.key_concentration[layer] == pytest.approx(expected.numpy(), rel=1e-6)
        weights = attention_weights(query, key, scaling)
        expected = value_error_concentration(weights, value, noisy[1][layer])
        assert found.value_concentration[layer] == pytest.approx(expected.numpy(), rel=1e-6)
