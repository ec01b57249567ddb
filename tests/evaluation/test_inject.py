import pytest
import torch
from support.eval_pair import sampled_windows, tiny

from kvhub.errors import Corrupt, Incompatible
from kvhub.evaluation.inject import KvRows, check_injection, injection_error, run


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_own_cache_injected_reproduces_the_logits(family):
    model = tiny(1, family=family)
    window = sampled_windows(model, 1, 40)[0]
    native, cache = run(model.model, window, keep=10)
    rows = KvRows.of(cache, 30)
    injected, _ = run(model.model, window[30:], start=30, rows=rows)
    assert injection_error(native, injected) < 1e-4
    # the check can tell: rows misplaced by one position are far outside
    misplaced, _ = run(model.model, window[30:], start=31, rows=rows)
    assert injection_error(native, misplaced) > 1e-2


def test_a_cache_that_is_not_attended_to_refuses():
    with pytest.raises(Incompatible, match="re-injected") as error:
        check_injection([1e-6, 0.5], "float32")
    assert error.value.code == "injection"
    with pytest.raises(Incompatible):
        check_injection([float("nan")], "float32")
    assert check_injection([1e-6, 1e-5], "float32") == 1e-5


def test_tail_without_rows_stands_at_its_true_positions():
    model = tiny(2)
    window = sampled_windows(model, 1, 20)[0]
    alone, _ = run(model.model, window[10:], start=10)
    reference = model.model(
        input_ids=window[None, 10:], position_ids=torch.arange(10, 20)[None], use_cache=False
    ).logits[0]
    assert torch.allclose(alone, reference, atol=1e-5)


def test_exact_prefix_takes_the_first_rows_from_the_native_cache():
    model = tiny(3)
    window = sampled_windows(model, 1, 12)[0]
    rows = KvRows.of(run(model.model, window)[1], 12)
    zeros = KvRows(
        tuple(torch.zeros_like(k) for k in rows.keys), tuple(torch.zeros_like(v) for v in rows.values)
    )
    mixed = zeros.with_exact_prefix(rows, 5)
    for layer in range(2):
        assert torch.equal(mixed.keys[layer][:5], rows.keys[layer][:5])
        assert torch.equal(mixed.values[layer][:5], rows.values[layer][:5])
        assert not mixed.keys[layer][5:].any()
        assert not mixed.values[layer][5:].any()


def test_wrong_number_of_layers_is_refused():
    one, three = tiny(4, layers=1), tiny(4, layers=3)
    window = sampled_windows(one, 1, 8)[0]
    rows = KvRows.of(run(one.model, window)[1], 8)
    with pytest.raises(Incompatible, match="1 layers, the model 3"):
        rows.to_cache(three.model)


def test_rows_with_nan_are_refused_by_layer():
    key = torch.zeros(3, 2, 4)
    bad = key.clone()
    bad[1, 0, 0] = float("nan")
    with pytest.raises(Corrupt, match="layer 1"):
        KvRows((key, key), (key, bad)).check_finite("the mapped cache")
