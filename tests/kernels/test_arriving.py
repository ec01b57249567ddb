"""Rows that arrive in pieces give what they give at once."""

from __future__ import annotations

import pytest
import torch
from support.applying import Case, again, check, make_problem

from kvhub_kernels.apply import make_applier, ready_bytes
from kvhub_kernels.arriving import Arriving, HostLane, apply_arriving
from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.reference import read
from kvhub_kernels.rows import Rows


def pieces_of(problem, lengths):
    """The source's rows in order of tokens as the exchange holds them: `[layers, 2, tokens, heads, dim]`."""
    source = problem.source
    whole = torch.stack(
        [
            torch.stack((read(k, source), read(v, source)))
            for k, v in zip(source.keys, source.values, strict=True)
        ]
    )
    return list(whole.split(lengths, dim=2))


def arrive(problem, applier, lengths, lane, **options):
    return apply_arriving(
        applier,
        Arriving(pieces_of(problem, lengths)),
        problem.target,
        problem.strip,
        problem.rotate,
        lane,
        **options,
    )


@pytest.mark.parametrize("lengths", [[150], [64, 64, 22], [3, 147], [1] * 30 + [120]])
@pytest.mark.parametrize("scattered", [True, False])
def test_any_cut_gives_the_same_rows(lengths, scattered):
    problem = make_problem(Case(tokens=150, scattered=scattered))
    applier = CpuApplier(problem.weights)
    assert arrive(problem, applier, lengths, HostLane(), group_tokens=64)
    check(problem, rounded=None)


def test_groups_are_whole_and_in_order():
    rows = [torch.full((1, 2, n, 1, 1), float(i)) for i, n in enumerate((64, 64, 30, 200, 5))]
    groups = list(Arriving(rows).groups(128))
    assert [sum(p.shape[2] for p in group) for group in groups] == [128, 30, 128, 77]
    flat = torch.cat([piece for group in groups for piece in group], dim=2)
    assert torch.equal(flat, torch.cat(rows, dim=2))


class Recorded(HostLane):
    """A lane with two buffers that are overwritten, as on a GPU, and a log of what was asked."""

    def __init__(self):
        super().__init__()
        self.log, self.buffers = [], {}

    def send(self, slot, pieces):
        joined = torch.cat(list(pieces), dim=2)
        self.log.append(("send", slot))
        old = self.buffers.get(slot)
        if old is not None:
            old.fill_(float("nan"))  # whoever still reads it, reads nonsense
        self.buffers[slot] = joined.clone()
        return self.buffers[slot]

    def landed(self, slot):
        self.log.append(("landed", slot))

    def read(self, slot):
        self.log.append(("read", slot))


def test_a_buffer_is_ordered_before_it_is_read_and_after_it_was():
    problem = make_problem(Case(tokens=150))
    lane = Recorded()
    assert arrive(problem, CpuApplier(problem.weights), [50, 50, 50], lane, group_tokens=50)
    check(problem, rounded=None)
    assert lane.log == [(what, slot) for slot in (0, 1, 0) for what in ("send", "landed", "read")]


def test_one_bad_piece_is_told():
    problem = make_problem(Case(tokens=150))
    problem.source.values[problem.plan.used[0]][problem.source.slots[10]] = float("inf")
    applier = CpuApplier(problem.weights)
    assert not arrive(problem, applier, [64, 64, 22], HostLane(), group_tokens=64)


def test_other_numbers_of_tokens_are_refused():
    problem = make_problem(Case(tokens=20))
    rows = Rows(problem.target.keys, problem.target.values, 19, problem.target.slots)
    with pytest.raises(ValueError, match="as many tokens"):
        apply_arriving(
            CpuApplier(problem.weights),
            Arriving(pieces_of(problem, [20])),
            rows,
            problem.strip,
            problem.rotate,
            HostLane(),
        )


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_is_known_before(weights, dtype):
    problem = again(make_problem(Case(weights=weights, tokens=2)))
    applier = make_applier(problem.weights, problem.rotate, device="cpu", dtype=dtype)
    assert applier.nbytes == ready_bytes(problem.weights, torch.device("cpu"), dtype)
