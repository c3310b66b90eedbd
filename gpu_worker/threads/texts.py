"""The texts of one request on their way through the engine.

    text run ──submit──► a request for each text, a few steps' worth at a time ──► vectors, in any order
       ▲                                                                                │
       └──────────── deltas of the whole request, in the order of its texts ◄───────────┘

Each text is a request of its own, so it is planned, preempted, cancelled and handed back like every other, and the
texts of several requests take turns. The run delivers a vector once those of all texts before it are delivered. So
what is delivered is always a beginning, and a later attempt goes on at the text behind it.

Everything here runs on the text thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from petiole.gpu_worker.errors import HandedBack
from petiole.gpu_worker.handle import Handle
from petiole.gpu_worker.request import (
    Delta,
    Embedding,
    FinishReason,
    Request,
    Result,
    SamplingParams,
    Timing,
    Usage,
)
from petiole.gpu_worker.request.texts import TextLimits
from petiole.gpu_worker.scheduling.stopping import End, Finish
from petiole.outputs import Prepared

ONE = SamplingParams(max_tokens=1, temperature=0.0)
"""The vector takes the place of one token."""


@dataclass(frozen=True, slots=True)
class TextInputs:
    """A prepared request of texts. ids: of each text, with its prompt; done: texts that an earlier attempt has
    delivered, which are not among these."""

    ids: Sequence[list[int]]
    done: int
    prepared: Prepared
    limits: TextLimits


class Submit(Protocol):
    """Queues one text, and never refuses by raising."""

    def __call__(
        self, request: Request, *, on_admitted: Callable[[Handle], None], on_done: Callable[[Handle], None]
    ) -> Handle: ...


class TextRun:
    """The run of one request. window: how many of its texts are in the engine at once. `finish` ends the
    request's handle."""

    def __init__(
        self,
        handle: Handle,
        inputs: TextInputs,
        submit: Submit,
        finish: Callable[[Result | BaseException], None],
        *,
        window: int,
        arrival_s: float,
    ) -> None:
        self.handle, self._inputs, self._submit, self._finish = handle, inputs, submit, finish
        self._window, self._arrival_s = window, arrival_s
        self._next = self._delivered = 0  # of `ids`
        self._vectors: dict[int, str] = {}  # made, and not delivered
        self._sent: list[str] = []
        self._open: set[Handle] = set()
        self._end: End | None = None
        self._cached = 0
        self._admitted_s: float | None = None
        self._first_s: float | None = None

    # ------------------------------------------------------------ events

    def start(self) -> None:
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
        self._open.discard(part)
        if self.handle.done():
            return
        if part.error is not None:
            self.end(part.error)
            return
        result = part.result()
        if result.vectors:
            self._vectors[k] = result.vectors[0]
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
        while self._end is None and self._next < len(self._inputs.ids) and len(self._open) < self._window:
            self._submit_next()
        over = self._end is not None or self._delivered == len(self._inputs.ids)
        if over and not self._open:
            self._conclude(self._end or Finish(FinishReason.STOP))

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
            prompt=self._inputs.ids[k],
            texts=None,
            sampling=ONE,
            deadline_s=deadline_s,
            resume_token_ids=(),
            request_id=f"{request.request_id}:{self._inputs.done + k}",
        )
        self._next += 1
        self._open.add(self._submit(part, on_admitted=self._part_admitted, on_done=partial(self._part_done, k)))

    def _deliver(self) -> None:
        """Deliver the vectors that follow those delivered."""
        first, vectors = self._delivered, list[str]()
        while self._delivered in self._vectors:
            vectors.append(self._vectors.pop(self._delivered))
            self._delivered += 1
        if vectors:
            self._sent += vectors
            counts = tuple(len(ids) for ids in self._inputs.ids[first : self._delivered])
            self.handle._push(Delta(self._inputs.done + first, counts, "", vectors=tuple(vectors)))

    def _conclude(self, end: End) -> None:
        if isinstance(end, BaseException):
            self._finish(end)
            return
        request, counts = self.handle.request, [len(ids) for ids in self._inputs.ids[: self._delivered]]
        self.handle._push(Delta(self._inputs.done + self._delivered, (), "", end.reason))
        asked, now = request.embedding or Embedding(), time.perf_counter()
        since = partial(_ms, self._arrival_s)
        admitted_s, first_s = self._admitted_s or now, self._first_s
        self._finish(
            Result(
                request_id=request.request_id,
                text="",
                token_ids=(*request.resume_token_ids, *counts),
                finish_reason=end.reason,
                stop_reason=end.stop_reason,
                usage=Usage(self._inputs.prepared.prompt_tokens, self._cached, 0),
                timing=Timing(
                    queue_ms=since(admitted_s),
                    prefill_ms=0.0 if first_s is None else _ms(admitted_s, first_s),
                    ttft_ms=None if first_s is None else since(first_s),
                    total_ms=since(now),
                ),
                model=self._inputs.prepared.model,
                vectors=tuple(self._sent),
                answer={"dimensions": self._inputs.limits.dimensions_of(asked), "encoding": asked.encoding},
            )
        )


def _ms(since_s: float, until_s: float) -> float:
    return round((until_s - since_s) * 1e3, 3)
