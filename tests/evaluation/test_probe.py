import torch
from support.eval_pair import sampled_windows, tiny

from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import attend
from kvhub.evaluation.probe import QueryProbe


def _attention_outputs(model, window):
    """What the attention of each layer hands to o_proj, `[tokens, heads, head_dim]`."""
    found, handles = [], []
    for layer in model.model.model.layers:
        handles.append(
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, args: found.append(args[0][0].unflatten(-1, (4, 16)).clone())
            )
        )
    try:
        run(model.model, window)
    finally:
        for handle in handles:
            handle.remove()
    return found


def test_queries_reproduce_the_models_own_attention_output():
    for family in ("qwen3", "llama"):
        model = tiny(5, family=family)
        window = sampled_windows(model, 1, 16)[0]
        expected = _attention_outputs(model, window)
        with QueryProbe(model.model, keep=1) as probe:
            _, cache = run(model.model, window)
        rows = KvRows.of(cache, 16)
        for layer in range(2):  # the last query attends to all rows, so causality plays no part
            out = attend(probe.queries[layer], rows.keys[layer], rows.values[layer], probe.scaling[layer])
            assert torch.allclose(out[:, 0], expected[layer][-1], atol=1e-5)


def test_probe_leaves_the_model_as_it_was():
    model = tiny(6)
    window = sampled_windows(model, 1, 12)[0]
    before, _ = run(model.model, window)
    with QueryProbe(model.model, keep=3) as probe:
        during, _ = run(model.model, window)
    assert model.model.config._attn_implementation == "sdpa"
    after, _ = run(model.model, window)
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert sorted(probe.queries) == [0, 1]
    assert probe.queries[0].shape == (4, 3, 16)
