"""Requests that this server makes to itself: an exact prefix, healing, shadows, a timed prefill.

They go into SGLang's own queue through its own dispatch, at the point where a client's
requests enter, and their answers end here: nothing of them is sent anywhere. They never
ask for reuse, and their names are made of a nonce, so a client cannot imitate one.
"""

from __future__ import annotations

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhub_sglang.report import logger


@dataclass
class Internal:
    """One request to ourselves.

    done: called on the scheduler's thread with SGLang's finished `Req`, or None where it
    was aborted. insert: whether the tree may keep what it computes. top: candidates whose
    log-probabilities are wanted for the token after the prompt.
    """

    kind: str
    tokens: Sequence[int]
    salt: str | None
    extra_key: str | None
    done: Callable[[Any], None] = lambda req: None
    insert: bool = True
    top: int = 0
    rid: str = field(default="")


class InternalRequests:
    """Those that wait to be sent, and those that were."""

    def __init__(self) -> None:
        self._prefix = f"kvhub-{secrets.token_hex(12)}-"
        self._count = 0
        self._wanted: deque[Internal] = deque()
        self._sent: dict[str, Internal] = {}

    def want(self, request: Internal) -> None:
        """Send it at the next scheduling pass."""
        self._wanted.append(request)

    def get(self, rid: str) -> Internal | None:
        """The internal request of that name."""
        return self._sent.get(rid) if rid.startswith(self._prefix) else None

    def is_ours(self, rid: str) -> bool:
        """Whether that name is one of ours, also after it came back."""
        return rid.startswith(self._prefix)

    @property
    def sent(self) -> int:
        """How many were ever sent."""
        return self._count

    @property
    def pending(self) -> int:
        """Requests that did not come back yet."""
        return len(self._wanted) + len(self._sent)

    def take(self) -> list[Internal]:
        """What to send now."""
        taken = list(self._wanted)
        self._wanted.clear()
        for request in taken:
            self._count += 1
            request.rid = f"{self._prefix}{self._count}"
            self._sent[request.rid] = request
        return taken

    def finished(self, rid: str, req: Any) -> None:
        """SGLang is done with it."""
        request = self._sent.pop(rid, None)
        if request is None:
            return
        reason = getattr(req, "finished_reason", None)
        aborted = req is None or reason is None or type(reason).__name__ == "FINISH_ABORT"
        try:
            request.done(None if aborted else req)
        except Exception:
            logger.exception("kvhub: an internal request (%s) failed", request.kind)


def as_input(request: Internal) -> Any:
    """SGLang's `TokenizedGenerateReqInput`."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request.rid,
        input_text=None,
        input_ids=array("q", request.tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=request.top > 0,
        logprob_start_len=-1,
        top_logprobs_num=request.top,
        token_ids_logprob=None,
        stream=False,
        no_logs=True,
        extra_key=request.extra_key,
        cache_salt=request.salt,
    )
