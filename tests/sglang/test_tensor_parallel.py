"""Two ranks, two processes, gloo: all of them reuse the same prefix, or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import two_ranks

from kvhub_sglang.supported import refused_weights

SMALL = Path(__file__).parents[2] / "models" / "small"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of every scenario, by rank; what each does stands in `support.two_ranks`."""
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), list(two_ranks.SCENARIOS))


@pytest.fixture
def both(results: dict[str, list[Any]], request: pytest.FixtureRequest) -> tuple[Any, Any]:
    found = results[request.node.name.removeprefix("test_")]
    for rank, result in enumerate(found):
        assert result is not None, f"rank {rank} did not get here"
        assert not isinstance(result, dict), f"rank {rank}: {result['error']}"
    return found[0], found[1]


def test_values_are_shared(both: tuple[Any, Any]) -> None:
    expected = [[0, "x"], ["a", 1, None], True, [True, False, 4]]
    assert both == (expected, expected)


def test_a_rank_that_failed_stops_both(both: tuple[Any, Any]) -> None:
    parted = "the ranks have parted"
    assert both == (["rank 1 failed", parted], ["no memory", parted])


def test_ranks_at_different_points_stop_at_once(both: tuple[Any, Any]) -> None:
    assert both[0] == both[1] == ["the ranks are at different points", True]


def test_a_rank_that_does_not_answer_is_given_up(both: tuple[Any, Any]) -> None:
    assert both[0] == "a rank does not answer"


def test_different_settings_are_refused(both: tuple[Any, Any]) -> None:
    assert both[0] == both[1] and "different settings" in both[0]


def test_a_source_without_ranks(both: tuple[Any, Any]) -> None:
    assert both[0][:3] == both[1] == [[0, 192, 192, 0, 192, 11], True, "mapped"]
    assert both[0][3:] == [128, True]  # and back: two pieces are one block for a server of degree 1


def test_a_source_with_ranks_and_heads_held_twice(both: tuple[Any, Any]) -> None:
    mapped = [[0, 192, 192, 0, 192, 9], True]
    published = 3 * 2 + 3  # two pieces of each block of the source, one of the head that both ranks hold
    assert both == ([*mapped, *mapped, published], [*mapped, published])


def test_a_damaged_piece_shortens_the_span_on_both(both: tuple[Any, Any]) -> None:
    assert both[0][0] == both[1][0] == [0, 128, 128, 128, 0, 73]


def test_rows_that_are_not_finite_on_one_rank(both: tuple[Any, Any]) -> None:
    prefilled = [0, 192, 0, 0, 0, 201]
    assert both == ([prefilled, True, "exchange", True], [prefilled, True, "not_finite", True])


def test_an_unexpected_error_on_one_rank(both: tuple[Any, Any]) -> None:
    """Nothing is reused, and at the next request both are off."""
    for result in both:
        assert [[native, loaded] for native, loaded, _ in result[:2]] == [[True, 0], [True, 0]]
        assert result[1][2], result


def test_one_rank_cannot_begin_to_read(both: tuple[Any, Any]) -> None:
    prefilled = [0, 0, 0, 0, 0, 201]
    assert both[0] == [[prefilled, "slow"], [prefilled, "exchange"]]
    assert both[1] == [[prefilled, "exchange"], [prefilled, "slow"]]


def test_one_rank_reads_too_slowly(both: tuple[Any, Any]) -> None:
    assert both[0] == both[1] == [[0, 0, 0, 0, 0, 201], "slow"]


def test_many_requests_in_step(both: tuple[Any, Any]) -> None:
    assert both[0] == both[1]
    _, wrong, mapped, serving = both[0]
    assert wrong == 0 and mapped > 0 and serving


class Part:
    """What one rank of two holds of the shipped small model's weights."""

    def __init__(self, rank: int) -> None:
        self.weights = {}
        for name, whole in load_file(SMALL / "model.safetensors").items():
            if "embed_tokens" in name:
                self.weights[name] = whole.chunk(2, dim=0)[rank]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                self.weights[name] = whole.chunk(2, dim=1)[rank]

    def named_parameters(self) -> Any:
        return ((name, torch.nn.Parameter(weight)) for name, weight in self.weights.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_compares_its_part_of_the_weights(rank: int) -> None:
    assert refused_weights(Part(rank), SMALL, rank=rank, size=2) is None
    assert "other weights" in str(refused_weights(Part(rank), SMALL, rank=1 - rank, size=2))
    assert refused_weights(Part(rank), SMALL) is not None
