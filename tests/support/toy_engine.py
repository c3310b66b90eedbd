"""An engine over the toy model, and the oracle that says what it must answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from petiole.gpu_worker import Delta, Engine, EngineConfig, FinishReason, Request, Result, SamplingParams
from petiole.gpu_worker.preparation.preparation import resolve_seed
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.scheduling.stopping import Finish
from petiole.gpu_worker.speculation import HeadDrafter, HeadProposer, NgramDrafter, Price
from tests.support.toy_runtime import ToyRuntime, toy_continuation
from tests.support.toy_text import ToyConstraint, ToyDetokenizer, ToyTokenizer, compile_toy

VOCAB = 48
EOS = 0
MAX_MODEL_LEN = 96


NAPS = (0, 0, 1, 0, 9)


class Bold(NgramDrafter):
    """Drafts, however often they were wrong. naps: how long it rests, again and again."""

    def __init__(self, naps: Sequence[int] = (0,)) -> None:
        super().__init__(2, 4)
        self._naps = itertools.cycle(naps)

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return 1024

    def rests(self, price: Price, *, in_flight: bool) -> int:
        return next(self._naps)

    def expects(self, n: int) -> float:
        return math.inf


class BoldProposer:
    def __init__(self, naps: Sequence[int] = (0,)) -> None:
        self._naps = naps

    def drafter(self, tokens: Sequence[int]) -> Bold:
        drafter = Bold(self._naps)
        drafter.extend(tokens)
        return drafter


class BoldHead(HeadDrafter):
    """Likewise, of what the runtime drafts."""

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return 1024

    def expects(self, n: int) -> float:
        return math.inf


class BoldHeadProposer(HeadProposer):
    def drafter(self, tokens: Sequence[int]) -> BoldHead:
        return BoldHead(self.unseen)


def toy_engine(
    *,
    runtime: ToyRuntime | None = None,
    jitter: Callable[[], None] | None = None,
    machine: dict[str, Any] | None = None,
    text: bool = True,
    tracer: Any = None,
    proposer: Any = None,
    **config: Any,
) -> Engine:
    """Not started. `machine` is for `ToyRuntime`, `config` for `EngineConfig`; every step is checked."""
    settings = {"max_num_seqs": 8, "debug": True, **config}
    shape = {"rows": settings["max_num_seqs"], "page_size": settings.get("page_size", 1), **(machine or {})}
    runtime = runtime or ToyRuntime(vocab_size=VOCAB, eos=frozenset({EOS}), jitter=jitter, **shape)
    tokenizer: Any = ToyTokenizer() if text else None
    more = {} if tracer is None else {"tracer": tracer}
    return Engine(
        EngineConfig(**settings),
        runtime=runtime,
        tokenizer=tokenizer,
        compile_constraint=compile_toy,
        proposer=proposer or BoldProposer(),
        **more,
    )


def request(prompt: list[int] | None = None, max_tokens: int = 12, **more: Any) -> Request:
    """Fields of `Request`, or else of `SamplingParams`; greedy unless it says otherwise."""
    fields = {key: more.pop(key) for key in list(more) if key in Request.__dataclass_fields__}
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **more})
    return Request(prompt=[5, 6, 7, 8] if prompt is None else prompt, sampling=sampling, **fields)


@dataclass(frozen=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None

    @staticmethod
    def of(result: Result) -> Expected:
        return Expected(result.token_ids, result.text, result.finish_reason, result.stop_reason)


class Watch:
    """Everything that one request's callbacks saw."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ends = 0

    def on_delta(self, handle: Handle, delta: Delta) -> None:
        assert self.ends == 0, "a delta after the end"
        self.deltas.append(delta)

    def on_done(self, handle: Handle) -> None:
        self.ends += 1


def expected(request: Request, max_model_len: int = MAX_MODEL_LEN, cut: int | None = None) -> Expected:
    """What the request must give, from the toy's definition and the stop rules alone. `cut`: a deadline or a
    cancel ends it after so many tokens, which lets out what the detokenizer holds."""
    prompt, sampling = [int(t) for t in request.prompt or ()], request.sampling
    constraint = ToyConstraint(VOCAB, request.constraint.value) if request.constraint else None
    adapter = request.adapter or ""
    tokens: list[int] = []
    text, detokenizer, n_told = "", ToyDetokenizer(), 0
    seed, ends, settled = resolve_seed(request), {EOS, *sampling.stop_token_ids}, 0
    source = toy_continuation(prompt, sampling, seed, constraint=constraint, adapter=adapter, ends=ends)
    for token in source:
        tokens.append(token)
        finish = _finish(request, tokens, len(prompt), max_model_len)
        if finish is None and constraint is not None and constraint.finished:
            finish = Finish(FinishReason.STOP, "constraint")
        if finish is None and len(tokens) == cut:
            finish = Finish(FinishReason.CANCELLED)
        if finish is None or finish.stop_reason not in ("eos", token):  # EOS and stop tokens have no text
            text, n_told = text + detokenizer.push([token]), len(tokens)
        stops = sampling.stop if n_told > sampling.min_tokens else ()
        if finish is not None and not any(_find(stop, text, settled) >= 0 for stop in stops):
            text += detokenizer.flush()
        settled = settled if stops else len(text)
        for stop in stops:
            if (at := _find(stop, text, settled)) >= 0:
                return Expected(tuple(tokens), text[:at], FinishReason.STOP, stop)
        if finish is not None:
            return Expected(tuple(tokens), text, finish.reason, finish.stop_reason)
    raise AssertionError("the toy never ends")


def _find(stop: str, text: str, settled: int) -> int:
    """Where the first stop string begins that ends behind the first `settled` characters, or -1."""
    return text.find(stop, max(0, settled - len(stop) + 1))


def _finish(request: Request, tokens: list[int], n_prompt: int, max_model_len: int) -> Finish | None:
    sampling, token = request.sampling, tokens[-1]
    for stop in sampling.stop_token_sequences:
        if len(tokens) > sampling.min_tokens and tokens[-len(stop) :] == list(stop):
            return Finish(FinishReason.STOP, str(list(stop)))
    if token == EOS and not sampling.ignore_eos:
        return Finish(FinishReason.STOP, "eos")
    if token in sampling.stop_token_ids:
        return Finish(FinishReason.STOP, token)
    if len(tokens) >= sampling.max_tokens:
        return Finish(FinishReason.LENGTH, "max_tokens")
    if n_prompt + len(tokens) >= max_model_len:
        return Finish(FinishReason.LENGTH, "max_model_len")
    return None
