"""lm-evaluation-harness's model interface over one arm: every item is answered on that arm's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from transformers import DynamicCache

from kvhub.errors import BadInput
from kvhub.evaluation.evidence import Arm
from kvhub.evaluation.inject import run
from kvhub.model.placement import input_device
from kvhub.tasks.caches import Caches

MAX_NEW_TOKENS = 256


class MappedLM(TemplateLM):  # type: ignore[misc]
    """Scores and generates on the cache of `arm`.

    A context of n tokens leaves n - 1 rows in the cache; the model runs the last one, whose logits
    predict the answer's first token, as a server does. A context beyond the models' positions loses
    its beginning.
    """

    def __init__(self, caches: Caches, arm: Arm, *, progress: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.caches, self.arm = caches, arm
        self.tokenizer = caches.source.tokenizer  # the pair has one vocabulary
        self._model = caches.model(arm).model
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        """What stands for an empty context."""
        return int(self.tokenizer.eos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Of the harness's cache of requests, which is not used."""
        return str(self.caches.source.identity.tokenizer)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the models read it."""
        text = self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of `string`."""
        ids: list[int] = self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # Answers to one context follow each other, so that its rows are computed once.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i][1]), requests[i][1]))
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for index in order:
            _, context, answer = requests[index]
            found[index] = self._score(context, answer)
            self._progress()
        return found

    def _score(self, context: list[int], answer: list[int]) -> tuple[float, bool]:
        """Log-likelihood (nats) of `answer`, and whether greedy decoding would give it."""
        if not answer:
            raise BadInput("an item has an empty answer")
        context = self._fit(context, len(answer))
        rows = self.caches.rows(self.arm, context[:-1])
        tokens = torch.tensor([context[-1], *answer[:-1]])
        logits, _ = run(self._model, tokens, start=len(context) - 1, rows=rows)
        labels = torch.tensor(answer, device=logits.device)
        chosen = torch.log_softmax(logits.double(), dim=-1).gather(1, labels[:, None])
        return float(chosen.sum()), bool((logits.argmax(-1) == labels).all())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to a stop string, for each `(context, settings)`."""
        return [self._generate(*request.args) for request in requests]

    def _generate(self, text: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        limit = int(settings.get("max_gen_toks", MAX_NEW_TOKENS))
        written = self.decode(self.tok_encode(text), stops, limit)
        self._progress()
        return written

    def decode(self, context: list[int], stops: Sequence[str], limit: int) -> str:
        """Greedy text after `context`, at most `limit` tokens, without the stop string."""
        context = self._fit(context, limit)
        rows = self.caches.rows(self.arm, context[:-1])
        logits, cache = run(self._model, torch.tensor(context[-1:]), start=len(context) - 1, rows=rows)
        written: list[int] = []
        while len(written) < limit:
            token = int(logits[-1].argmax())
            if token == self.eot_token_id:
                break
            written.append(token)
            if cut := _before(self.tokenizer.decode(written), stops):
                return cut[0]
            logits = _step(self._model, cache, token, len(context) + len(written) - 1)
        text: str = self.tokenizer.decode(written)
        return text

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Refused: a text scored from its first token has no prefix that could be mapped."""
        raise BadInput(
            "the perplexity of whole texts has no mapped prefix",
            "kvhub eval --text FILE measures it after a mapped prefix (for WikiText-2: its test text)",
        )

    def _fit(self, context: list[int], more: int) -> list[int]:
        room = self.caches.context - more
        if room < 1:
            raise BadInput(
                f"an answer of {more} tokens does not fit the models' {self.caches.context} positions"
            )
        return context[-room:]


def _before(text: str, stops: Sequence[str]) -> tuple[str] | None:
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return (text[: min(places)],) if places else None


def _step(model: Any, cache: DynamicCache, token: int, position: int) -> Tensor:
    """Logits `[1, vocabulary]` after one more token."""
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor([[token]], device=input_device(model)),
            position_ids=torch.tensor([[position]], device=input_device(model)),
            past_key_values=cache,
            use_cache=True,
        )
    logits: Tensor = out.logits[0, -1:].float()
    return logits
