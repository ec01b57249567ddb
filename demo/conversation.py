"""The conversation that switches models, and the same one without kvhub."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from support.server import Server, hints

TURNS = ("small", "large", "small")
FIRST, NEXT, ANSWER = 448, 96, 24
"""Tokens of the first message, of each later one, and of each answer."""
MAX_HOPS = 2


@dataclass(frozen=True)
class Turn:
    """One row of the report; times are medians over the conversations, in milliseconds."""

    model: str
    prompt_tokens: int
    exact_tokens: int
    mapped_tokens: int
    prefilled_tokens: int
    ttft_ms: float
    ttft_ms_without: float
    agreement: float
    reason: str
    mapped_in: int
    """Number of conversations in which this turn mapped something."""
    exact_tokens_without: int
    """What the model's own cache covered in the run without kvhub."""


@dataclass(frozen=True)
class Answer:
    """What a server said: the tokens, the time to the first one, and kvhub's account of the prompt."""

    ids: list[int]
    ttft_ms: float
    account: dict[str, Any]
    cached: int


def story_tokens() -> int:
    """How much text of a story one conversation uses."""
    return FIRST + NEXT * (len(TURNS) - 1)


def hold(servers: dict[str, Server], stories: Sequence[list[int]]) -> list[Turn]:
    """Hold each conversation with reuse, then at once again without; one `Turn` for each switch.

    The two runs of a conversation lie seconds apart, so that other load on the machine meets both.
    """
    pairs = []
    for story in stories:
        switched = _with_reuse(servers, story)
        _flush(servers)
        pairs.append((switched, _native(servers, switched)))
        _flush(servers)
    return [
        _summary(name, [said[i] for said, _ in pairs], [native[i] for _, native in pairs])
        for i, name in enumerate(TURNS)
    ]


def _flush(servers: dict[str, Server]) -> None:
    """Empty both servers' own caches (not the exchange)."""
    for server in servers.values():
        server.flush()


def _with_reuse(servers: dict[str, Server], story: list[int]) -> list[tuple[list[int], Answer]]:
    history: list[int] = []
    said = []
    for turn, name in enumerate(TURNS):
        message = story[:FIRST] if turn == 0 else story[FIRST + NEXT * (turn - 1) : FIRST + NEXT * turn]
        prompt = [*history, *message]
        answer = _ask(servers[name], prompt, reuse=True)
        said.append((prompt, answer))
        history = [*prompt, *answer.ids]
    return said


def _native(
    servers: dict[str, Server], conversation: Sequence[tuple[list[int], Answer]]
) -> list[tuple[Answer, float]]:
    """The same prompts with kvhub out of the way, and how often the answers agree."""
    found = []
    for name, (prompt, answer) in zip(TURNS, conversation, strict=True):
        plain = _ask(servers[name], prompt, reuse=False)
        found.append((plain, _agreement(servers[name], prompt, answer.ids)))
    return found


def _ask(server: Server, prompt: list[int], *, reuse: bool) -> Answer:
    """One streamed greedy answer."""
    fields = {"kv_hints": hints(max_hops=MAX_HOPS)} if reuse else {}
    first_ms, _, last = server.stream(prompt, ANSWER, **fields)
    if "error" in last or not last:
        raise SystemExit(f"the demo stops: {server.url} answered {last}")
    meta = last["meta_info"]
    account = meta.get("kvhub") or {}
    if isinstance(account, list):
        account = next((one for one in account if one), {})
    return Answer(last["output_ids"], first_ms, account, meta["cached_tokens"])


def _agreement(server: Server, prompt: list[int], answer: list[int]) -> float:
    """Share of `answer` that the model puts first at that position after a native prefill."""
    scored = server.generate(
        [*prompt, *answer], 1, return_logprob=True, logprob_start_len=len(prompt) - 1, top_logprobs_num=1
    )
    # Entry i predicts position len(prompt) - 1 + i, and the first has no prediction.
    best = [top[0][1] for top in scored["meta_info"]["input_top_logprobs"][1:]]
    return sum(token == found for token, found in zip(answer, best, strict=True)) / len(answer)


def _summary(
    name: str, switched: Sequence[tuple[list[int], Answer]], native: Sequence[tuple[Answer, float]]
) -> Turn:
    prompt, first = switched[0]
    account = first.account
    if not account:
        raise SystemExit("the demo stops: the server's answer holds no kvhub account")
    return Turn(
        model=name,
        prompt_tokens=len(prompt),
        exact_tokens=account["exact"],
        mapped_tokens=account["mapped"],
        prefilled_tokens=account["prefilled"],
        ttft_ms=round(statistics.median(answer.ttft_ms for _, answer in switched), 1),
        ttft_ms_without=round(statistics.median(answer.ttft_ms for answer, _ in native), 1),
        agreement=round(statistics.fmean(share for _, share in native), 3),
        reason=str(account["reason"]),
        mapped_in=sum(answer.account.get("mapped", 0) > 0 for _, answer in switched),
        exact_tokens_without=native[0][0].cached,
    )


def as_dict(turn: Turn) -> dict[str, Any]:
    """A turn as it stands in demo-report.json."""
    return asdict(turn)
