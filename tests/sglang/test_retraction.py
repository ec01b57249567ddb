"""SGLang takes running requests' rows away and queues them again: reports stay true, nothing is lost."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_parallel, get_server_args
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.pools import LARGE, SMALL, Engine, Running, mapper_between, native_rows

from kvhub_sglang import hooks

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASKS: dict[str, dict[str, Any] | None] = {
    "mapped": {"reuse": True},
    "not_asked": None,
    "declined": {"reuse": False},
}


class Client:
    """What leaves SGLang's own streamer, made as its scheduler makes it with the hook in place."""

    def __init__(self, engine: Engine) -> None:
        hooks.watch_weights(engine.cache.switch_off)
        self.reports: list[list[dict[str, Any]]] = []
        streamer = hooks._streamer_class(SchedulerOutputStreamer)
        assert streamer is not None
        self.streamer = streamer(
            send_to_detokenizer=self,
            tree_cache=engine.cache,
            server_args=get_server_args(),
            is_generation=True,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )

    def send_output(self, payload: Any) -> None:
        info = payload.customized_info
        self.reports += (info.unwrap() if hasattr(info, "unwrap") else info or {}).get("kvhub", [])

    def stream(self, req: Req) -> None:
        """The end of a batch that the request was in."""
        with get_parallel().override(dp_rank=None, attn_tp_rank=0):
            self.streamer.stream_output([req], False)

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The reports that one client received."""
        return [report for reports in self.reports for report in reports]


def request(engine: Engine, ask: dict[str, Any] | None) -> Req:
    params = SamplingParams(max_new_tokens=80, custom_params={"kvhub": ask} if ask else None)
    req = Req("streamed", "", array("q", PROMPT), params, stream=True)
    req.tokenizer = None
    return req


def adds_up(meta: dict[str, Any]) -> bool:
    return meta["exact"] + meta["mapped"] + meta["prefilled"] == len(PROMPT)


def retract(engine: Engine, running: Running) -> Req:
    """As SGLang does in `retract_decode`, and its scheduler right after it."""
    engine.drop(running)
    running.req.reset_for_retract()
    engine.cache.arrived(running.req)
    assert adds_up(running.meta)
    return running.req


def readmit(engine: Engine, req: Req) -> Running:
    running = engine.admit(req)
    req.is_retracted = False  # SGLang: prepare_for_extend
    assert adds_up(running.meta)
    return running


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 70])
def test_a_report_is_sent_once_and_adds_up(tmp_path: Path, page_size: int, ask: str, tokens: int) -> None:
    """Retracted before its first token (a batch in flight with overlap), after it, and later."""
    root = tmp_path / "exchange"
    Engine(SMALL, root, page_size=page_size).run(PROMPT, 4)
    engine = Engine(LARGE, root, (MAPPER,), page_size=page_size)
    client = Client(engine)
    running = engine.admit(request(engine, ASKS[ask]))
    assert running.meta["reason"] == ask and adds_up(running.meta)
    for _ in range(tokens):
        engine.decode(running, 1)
        client.stream(running.req)
    req = retract(engine, running)
    client.stream(req)  # the batch that was in flight ends; its token is thrown away
    again = readmit(engine, req)
    engine.decode(again, 3)
    client.stream(req)
    engine.finish(again)
    client.stream(req)
    [report] = client.seen
    assert adds_up(report) and report["reason"] == ask and (report["mapped"] > 0) == (ask == "mapped")
    engine.empty()


@pytest.mark.parametrize("page_size", [1, 16])
def test_retracted_again_and_again(tmp_path: Path, page_size: int) -> None:
    root = tmp_path / "exchange"
    Engine(SMALL, root, page_size=page_size).run(PROMPT, 4)
    engine = Engine(LARGE, root, (MAPPER,), page_size=page_size)
    client = Client(engine)
    req = request(engine, ASKS["mapped"])
    running = engine.admit(req, chunk=3)
    engine.extend(running, 64)
    for count in (1, 0, 64, 5):
        if count:
            engine.decode(running, count)
        client.stream(req)
        running = readmit(engine, retract(engine, running))
    mapped = running.meta["mapped"]
    assert mapped == 192 or mapped == 200 - 200 % page_size
    # what was computed after the mapped rows is the model's own
    torch.testing.assert_close(
        engine.row(running, 200)[:, :, 192:], native_rows(LARGE, PROMPT[192:], range(192, 200))
    )
    engine.decode(running, 1)
    engine.finish(running)
    client.stream(req)
    assert len(client.seen) == 1 and engine.cache.serving is not None
    engine.empty()


def test_a_request_that_waits_already_reports_what_adds_up(tmp_path: Path) -> None:
    engine = Engine(LARGE, tmp_path / "exchange", (MAPPER,))
    req = request(engine, ASKS["mapped"])
    engine.cache.arrived(req)
    meta = req.customized_info["kvhub"][0]
    assert meta["reason"] == "staging" and adds_up(meta) and meta["prefilled"] == len(PROMPT)
    engine.cache.release_aborted_request(req.cache_request_handle)
