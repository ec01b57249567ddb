"""The dual ridge against the primal one, the layer scores against a plain loop, and advice on real pairs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.eval_pair import sampled_windows, tiny
from support.fitting import Pair

from kvhub.cli import run
from kvhub.transfer.advise import LIKELY, advise, candidates, kept
from kvhub.transfer.dual import Fold, folds, head_kernels, predict
from kvhub.transfer.layers import STRENGTH, cross_validated_scores
from kvhub.transfer.probe import Outcome, Probe, probe_pair


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def primal(
    x: np.ndarray, y: np.ndarray, strength: float, inside: np.ndarray, outside: np.ndarray
) -> np.ndarray:
    mean_x, mean_y = x[inside].mean(0), y[inside].mean(0)
    gram = (x[inside] - mean_x).T @ (x[inside] - mean_x)
    gram += strength * np.trace(gram) / len(gram) * np.eye(len(gram))
    weight = np.linalg.solve(gram, (x[inside] - mean_x).T @ (y[inside] - mean_y))
    return (x[outside] - mean_x) @ weight + mean_y


@pytest.mark.parametrize("support", ["full", "head-local"])
def test_the_dual_predicts_what_the_primal_predicts(support: str) -> None:
    layers = [3 + rows(layer, 12, 2, 5) for layer in range(3)]  # 30 features, 8 rows; means far from zero
    y = 2 + rows(9, 12, 4)
    kernels = head_kernels([layer.float() for layer in layers])
    fold = Fold(torch.arange(8), torch.arange(8, 12))
    single = [layer.float().double() for layer in layers]
    if support == "full":
        kernel, x = kernels[[0, 2]].sum((0, 1)), torch.cat([single[0], single[2]], 2).flatten(1)
        x = torch.cat([single[0].flatten(1), single[2].flatten(1)], 1)
    else:
        kernel, x = kernels[[0, 2]].sum(0)[1], torch.cat([single[0][:, 1], single[2][:, 1]], 1)
    found = predict(kernel, x.shape[1], y, fold, [1e-3, 1.0])
    for number, strength in enumerate((1e-3, 1.0)):
        expected = primal(x.numpy(), y.numpy(), strength, fold.fitted.numpy(), fold.held_out.numpy())
        assert found[number].numpy() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_folds_hold_out_every_window_once_and_whole() -> None:
    parts = folds(5, 4, 3)
    held = torch.cat([fold.held_out for fold in parts])
    assert sorted(held.tolist()) == list(range(20))
    for fold in parts:
        assert not set(fold.fitted.tolist()) & set(fold.held_out.tolist())
        assert len({(n // 4) for n in fold.held_out.tolist()}) * 4 == len(fold.held_out)


def test_layer_scores_against_a_loop() -> None:
    layers = [rows(layer, 12, 2, 3) for layer in range(2)]
    targets = [rows(5, 12, 4), layers[1].flatten(1) @ rows(6, 6, 4)]  # the second follows from layer 1
    kernels = head_kernels(layers)
    parts = folds(3, 4, 3)
    found = cross_validated_scores((kernels, kernels), (targets, targets), 6, parts)
    for target in range(2):
        for layer in range(2):
            error = np.zeros(())
            y = targets[target].numpy()
            for fold in parts:
                inside, outside = fold.fitted.numpy(), fold.held_out.numpy()
                guess = primal(layers[layer].flatten(1).numpy(), y, STRENGTH, inside, outside)
                error = error + ((guess - y[outside]) ** 2).sum()
            expected = 1 - error / ((y - y.mean(0)) ** 2).sum()
            assert float(found[target, layer]) == pytest.approx(expected, abs=1e-8)
    assert float(found[1, 1]) > 0.8 > float(found[1, 0])


def test_a_model_maps_to_itself_and_not_to_a_stranger() -> None:
    model, stranger = tiny(1), tiny(7, family="llama")
    windows = sampled_windows(model, 6, 33, seed=3)
    tried = candidates(model.identity.geometry, model.identity.geometry)
    assert tried == [(1, "full"), (2, "full"), (1, "head-local"), (2, "head-local")]
    itself = probe_pair(model, model, windows, tried, tail=9)
    other = probe_pair(stranger, model, windows, tried, tail=9)
    assert itself.tokens == 6 * 24
    best, worst = (max(kept(one, probe) for one in probe.outcomes) for probe in (itself, other))
    assert best > 0.9 > worst
    assert advise(itself, 2).verdict == "likely"
    # each layer is best said by itself, and one layer is enough
    assert [int(np.argmax(row)) for row in itself.scores] == [0, 1]
    assert advise(itself, 2).k == 1
    assert probe_pair(model, model, windows, tried[:1], tail=9).outcomes[0] == itself.outcomes[0]


def outcome(k: int, kl: float, **more: float) -> Outcome:
    values = {"attention_cosine": 0.9, "residual_error": 0.1, "excess_nll": 0.1, "top1": 0.9,
              "key_share": 0.5, "first_error": 1.0}  # fmt: skip
    return Outcome(k=k, support="full", kl=kl, **(values | more))


def test_advice_takes_the_cheapest_of_what_is_as_good() -> None:
    near = advise(Probe([outcome(8, 0.10), outcome(2, 0.11), outcome(1, 0.5)], 1.0, 100, []), 4)
    assert (near.k, near.verdict) == (2, "likely")
    assert near.context_kept == pytest.approx(0.9)
    assert "let `--k auto` decide" in near.notes[0]
    alone = advise(Probe([outcome(8, 1 - LIKELY + 0.05)], 1.0, 100, []), 4)
    assert (alone.verdict, alone.notes) == ("doubtful", [])
    assert advise(Probe([outcome(1, 2.0)], 1.0, 100, []), 4).verdict == "unlikely"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"first_error": 5.0}, "--exact-prefix"),
        ({"key_share": 0.9}, "keys alone"),
        ({"key_share": 0.1}, "values make"),
    ],
)
def test_advice_names_what_errs(measured: dict[str, float], said: str) -> None:
    found = advise(Probe([outcome(1, 0.2, **measured)], 1.0, 100, []), 4)
    assert len(found.notes) == 1 and said in found.notes[0]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    pair = Pair.make(tmp_path)  # equal head counts, unequal sizes
    text = ["--text", pair.text, "--windows", "3", "--prefix", "24", "--tail", "8"]
    assert run(["transfer", pair.source, pair.target, *text]) == 0
    out = capsys.readouterr().out
    assert "tokens       72 mapped, 3 windows" in out and "verdict " in out
    assert run(["transfer", pair.source, pair.target, *text, "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    tried = [(one["k"], one["support"]) for one in record["probe"]["outcomes"]]
    assert tried == [(k, support) for support in ("full", "head-local") for k in (1, 2, 3)]
    assert (record["k"], record["support"]) in tried
    assert f"try          kvhub fit ... --k {record['k']} --support {record['support']}" in out
    assert run(["transfer", pair.source, pair.target, *text, *text[:2]]) == 2
    assert "the same text is there twice" in capsys.readouterr().err
    assert run(["transfer", pair.source, str(tmp_path), *text]) != 0
    assert "Traceback" not in capsys.readouterr().err
