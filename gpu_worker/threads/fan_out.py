"""The texts of one request on their way through the engine.

    text run ──submit──► a request for each text, a few steps' worth at a time ──► vectors, in any order
       ▲                                                                                │
       └──────────── deltas of the whole request, in the order of its texts ◄───────────┘

Each text is a request of its own, so it is planned, preempted, cancelled and handed back like every other, and the
texts of several requests take turns. What is made of a text, its vector or its scores, is delivered once that of
all texts before it is. So what is delivered is always a beginning, and a later attempt goes on at the text after
it.

One model answers all texts of a request. If another one is loaded meanwhile, a request of which nothing is
delivered is prepared again and starts over; any other ends with ModelChanged.

Everything here runs on the text thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from petiole.gpu_worker.exceptions import EngineError, HandedBack, ModelChanged
from petiole.gpu_worker.preparation.embeddings import TextInputs, changed
from petiole.gpu_worker.request import (
    Delta,
    Embedding,
    FinishReason,
    Request,
    Result,
    Timing,
    Usage,
)
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.request.pooling import Made
from petiole.gpu_worker.scheduling.stopping import End, Finish


class SubmitText(Protocol):
    """Queues one text, and never refuses by raising."""

    def __call__(
        self, request: Request, *, on_admitted: Callable[[Handle], None], on_done: Callable[[Handle], None]
    ) -> Handle: ...


class TextRun:
    """The run of one request. window: how many of its texts are in the engine at once. `finish` ends the
    request's handle. `count` is called with how many texts are delivered."""

    def __init__(
        self,
        handle: Handle,
        inputs: TextInputs,
        submit: SubmitText,
        finish: Callable[[Result | BaseException], None],
        count: Callable[[int], None],
        *,
        window: int,
        arrival_s: float,
    ) -> None:
        self.handle, self._inputs, self._submit, self._finish = handle, inputs, submit, finish
        self._count = count
        self._window, self._arrival_s = window, arrival_s
        self._next = self._delivered = 0  # of `tokens`
        self._made: dict[int, Made] = {}  # not delivered
        self._sent: list[Made] = []
        self._open: set[Handle] = set()
        self._end: End | None = None
        self._waiting = False  # to start over
        self._cached = 0
        self._admitted_s: float | None = None
        self._first_s: float | None = None

    # ------------------------------------------------------------ events

    def start(self) -> None:
        self._go_on()

    def reloaded(self, fingerprint: str) -> bool:
        """The engine serves this model now. Whether the request is to be prepared again, and to `start_over`."""
        begun_with = self._inputs.prepared.fingerprint
        if self.handle.done() or self._waiting or begun_with == fingerprint:
            return False
        self._abandon()
        delivered = self._inputs.done + self._delivered
        if self._end is None and not delivered:
            self._waiting = True
            return True
        self._end = self._end or ModelChanged(changed(delivered, begun_with, fingerprint))
        self._go_on()
        return False

    def start_over(self, inputs: TextInputs) -> None:
        """With the request as it was prepared for another model."""
        assert self._waiting, f"request {self.handle.request.request_id} has not been abandoned"
        self._waiting, self._inputs, self._next, self._cached, self._first_s = False, inputs, 0, 0, None
        self._go_on()

    def end(self, end: End) -> None:
        """End the request: its open texts first."""
        if self._end is None:
            self._end = end
            for part in tuple(self._open):
                part.hand_back() if isinstance(end, HandedBack) else part.cancel()
        self._go_on()

    def _part_admitted(self, part: Handle) -> None:
        if self._admitted_s is None:
            self._admitted_s = time.perf_counter()
            self.handle._admit()

    def _part_done(self, k: int, part: Handle) -> None:
        if part not in self._open or self.handle.done():
            return
        self._open.discard(part)
        if part.error is not None:
            self.end(part.error)
            return
        result = part.result()
        try:
            made = self._inputs.made(result)
        except EngineError as error:
            self.end(error)
            return
        if made is not None:
            self._made[k] = made
            self._cached += result.usage.cached_prompt_tokens
            self._first_s = self._first_s or time.perf_counter()
            self._deliver()
            self._go_on()
        else:  # ended before its vector was made
            self.end(Finish(result.finish_reason))

    # ------------------------------------------------------------ effects

    def _go_on(self) -> None:
        """Submit the next texts; at the end, end the request."""
        if self.handle.done():
            return
        n = len(self._inputs.tokens)
        window = 1 if self._inputs.alike and not self._delivered else self._window
        while self._end is None and self._next < n and len(self._open) < window:
            self._submit_next()
        over = self._end is not None or self._delivered == n
        if over and not self._open:
            self._conclude(self._end or Finish(FinishReason.STOP))

    def _abandon(self) -> None:
        """Cancel the texts in the engine, and forget what is made and not delivered."""
        parts = tuple(self._open)
        self._open.clear()
        self._made.clear()
        for part in parts:
            part.cancel()

    def _submit_next(self) -> None:
        k, request = self._next, self.handle.request
        deadline_s = request.deadline_s
        if deadline_s is not None and self._admitted_s is not None:
            deadline_s -= time.perf_counter() - self._admitted_s
            if deadline_s <= 0:
                self._end = Finish(FinishReason.DEADLINE)
                return
        part = replace(
            request,
            prompt=self._inputs.tokens[k].ids,
            second_at=self._inputs.tokens[k].second_at,
            unpooled=self._inputs.tokens[k].prompt,
            texts=None,
            scoring=None if self._inputs.sampling.logprobs is not None else request.scoring,
            sampling=self._inputs.sampling,
            deadline_s=deadline_s,
            resume_token_ids=(),
            request_id=f"{request.request_id}:{self._inputs.done + k}",
        )
        self._next += 1
        self._open.add(self._submit(part, on_admitted=self._part_admitted, on_done=partial(self._part_done, k)))

    def _deliver(self) -> None:
        """Deliver what follows the texts that are delivered."""
        first, made = self._delivered, list[Made]()
        while self._delivered in self._made:
            made.append(self._made.pop(self._delivered))
            self._delivered += 1
        if made:
            self._sent += made
            self._count(len(made))
            counts = self._counts(first)
            self.handle._push(Delta(self._inputs.done + first, counts, "", **self._field(made)))

    def _counts(self, first: int = 0) -> tuple[int, ...]:
        """The numbers of tokens of the texts delivered, from `first` on."""
        return tuple(len(one.ids) for one in self._inputs.tokens[first : self._delivered])

    def _field(self, made: Sequence[Made]) -> dict[str, Any]:
        request = self.handle.request
        names = ("scores",) if request.scoring is not None else (request.embedding or Embedding()).fields
        return {name: tuple(one[name] for one in made) for name in names}

    def _conclude(self, end: End) -> None:
        if isinstance(end, BaseException):
            self._finish(end)
            return
        request, scoring = self.handle.request, self.handle.request.scoring
        self.handle._push(Delta(self._inputs.done + self._delivered, (), "", end.reason))
        now = time.perf_counter()
        since = partial(_ms, self._arrival_s)
        admitted_s, first_s = self._admitted_s or now, self._first_s
        self._finish(
            Result(
                request_id=request.request_id,
                text="",
                token_ids=(*request.resume_token_ids, *self._counts()),
                finish_reason=end.reason,
                stop_reason=end.stop_reason,
                usage=Usage(self._inputs.prepared.prompt_tokens, self._cached, 0),
                timing=Timing(
                    queue_ms=since(admitted_s),
                    prefill_ms=0.0 if first_s is None else _ms(admitted_s, first_s),
                    ttft_ms=None if first_s is None else since(first_s),
                    total_ms=since(now),
                    ended_at=round(time.time(), 3),
                ),
                model=self._inputs.prepared.model,
                best=None if scoring is None else scoring.best,
                answer=self._inputs.answer,
                **self._field(self._sent),
            )
        )


def _ms(since_s: float, until_s: float) -> float:
    return round((until_s - since_s) * 1e3, 3)
