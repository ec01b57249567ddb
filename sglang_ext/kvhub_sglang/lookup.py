"""Ask the exchange what is there for one request, on a worker: the best source of each block.

Headers are asked for in runs, since a round trip to a store on another machine takes as long as
many of them. A run is never much longer than what was found before it, so that a short history
costs few headers that nobody needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from kvhub.exchange import BLOCK_TOKENS, EXACT, Block, BlockHeader, Namespace, chain_keys
from kvhub.serving.cost import Estimate
from kvhub_sglang.decide import Question
from kvhub_sglang.plan import BlockSource, reach_of
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.serving import Candidate, Serving
from kvhub_sglang.stage import Found

_FIRST_RUN, _LONGEST_RUN = 8, 64
_KINDS: tuple[Literal["exact", "lossy"], ...] = ("exact", "lossy")


def look_up(serving: Serving, question: Question) -> Found:
    """The blocks to read, contiguous from what the device holds, and why there are not more.

    Headers are believed for looking alone; what is read is proven.
    """
    own = _own(serving, question)
    why = question.absent
    own_end = min(reach_of(own, question.exact), question.limit)
    start = max(own_end - own_end % serving.page_size, question.lossy)
    mapped: dict[int, BlockSource] = {}
    if question.candidates:
        mapped, why = _mapped(serving, question, start)
    reach = min(reach_of({**mapped, **own}, start), question.limit)
    found = Found({**mapped, **own}, why)
    if question.candidates and question.worth_it(reach - own_end, found, serving.settings.min_span):
        # own blocks below the device's lossy rows are not needed: those rows are there
        kept = own if question.lossy <= own_end else {}
        found = Found({**mapped, **kept}, why)
        found.estimate = _estimate(serving, question, found.blocks, start, reach)
        if not mapped or question.choice.worth == "always" or found.estimate.worth:
            for candidate in found.candidates:
                candidate.make_ready()  # here, not on the scheduler's thread
            return found
        return Found(own, Refusal(Code.NOT_WORTH_IT, found.estimate.reason), found.estimate)
    return Found(own, why)


def _estimate(
    serving: Serving, question: Question, blocks: dict[int, BlockSource], start: int, reach: int
) -> Estimate:
    """Mapping from `start` to `reach`, against computing what the device and own blocks do not give."""
    counts: Counter[str] = Counter()
    for index, source in blocks.items():
        if source.candidate is not None:
            counts[source.candidate.digest] += BLOCK_TOKENS - max(0, start - index * BLOCK_TOKENS)
    return serving.cost.judge(
        prompt=len(question.tokens),
        held=start,
        reach=reach,
        mapped=counts,
        blocks=sum(source.candidate is not None for source in blocks.values()),
    )


def read(serving: Serving, source: BlockSource) -> Block:
    """Read and check one block."""
    candidate = source.candidate
    model = candidate.source_digest if candidate else serving.digest
    layout = candidate.layout if candidate else serving.layout
    return serving.exchange.get(source.key, model=model, layout=layout)


def runs(first: int, stop: int) -> Iterator[range]:
    """`[first, stop)` in runs of 8, 16, 32 and then 64 blocks."""
    size = _FIRST_RUN
    while first < stop:
        yield range(first, min(first + size, stop))
        first, size = first + size, min(2 * size, _LONGEST_RUN)


def _own(serving: Serving, question: Question) -> dict[int, BlockSource]:
    """Own exact blocks in the exchange beyond the device."""
    tokens = question.tokens[: question.limit]
    keys = chain_keys(Namespace(serving.digest, "exact", question.tenant), tokens)
    blocks: dict[int, BlockSource] = {}
    for run in runs(question.exact // BLOCK_TOKENS, len(keys)):
        headers = serving.exchange.headers(keys[run.start : run.stop])
        for index, header in zip(run, headers, strict=True):
            if header is None or not header.lineage.exact:
                return blocks
            blocks[index] = BlockSource(keys[index], None, EXACT, serving.layout.nbytes)
    return blocks


def _mapped(serving: Serving, question: Question, start: int) -> tuple[dict[int, BlockSource], Refusal]:
    """Mapped blocks from `start` on, and why there are not more."""
    tokens = question.tokens[: question.limit]
    # exact blocks of every source before any lossy one: they have the fewest mappers under them
    chains = [
        (kind, candidate, chain_keys(Namespace(candidate.source_digest, kind, question.tenant), tokens))
        for kind in _KINDS
        for candidate in question.candidates
    ]
    blocks: dict[int, BlockSource] = {}
    for run in runs(start // BLOCK_TOKENS, question.limit // BLOCK_TOKENS):
        best: dict[int, BlockSource] = {}
        refusals: dict[int, Refusal] = {}
        for kind, candidate, keys in chains:
            open_ = [i for i in run if i not in best or best[i].lineage.hops > 1]
            if kind == "lossy" and question.choice.max_hops == 1:
                open_ = open_[:1]  # none can be used; the first says why the span ends there
            headers = serving.exchange.headers([keys[i] for i in open_]) if open_ else []
            for index, header in zip(open_, headers, strict=True):
                found = _usable(question, candidate, keys[index], index, header)
                if isinstance(found, Refusal):
                    refusals[index] = found
                elif found and (index not in best or found.lineage.hops < best[index].lineage.hops):
                    best[index] = found
        for index in run:
            if index not in best:
                absent = Refusal(Code.NO_SOURCE, f"no block {index} of an allowed source")
                return blocks, refusals.get(index, absent)
            blocks[index] = best[index]
    return blocks, Refusal(Code.SHORT, "too few tokens to gain")


def _usable(
    question: Question, candidate: Candidate, key: bytes, index: int, header: BlockHeader | None
) -> BlockSource | Refusal | None:
    """A source's block as a source of rows here; why not; None where there is none."""
    if header is None:
        return None
    if header.lineage.hops >= min(question.choice.max_hops, candidate.max_hops):
        hops = header.lineage.hops + 1
        return Refusal(Code.HOPS, f"block {index} would have {hops} mappers under it")
    lineage = header.lineage.then(candidate.digest)
    if not set(lineage.mappers) <= set(question.allowed):
        return Refusal(Code.HOPS, f"block {index} has a mapper under it that is not allowed")
    return BlockSource(key, candidate, lineage, candidate.layout.nbytes)
