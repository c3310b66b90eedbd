"""The open requests of an engine: each from its submission to its end, on its way through the threads.

    submit ──► preparation threads ──► engine thread ──► text thread ──► forgotten
                    |  a request of texts                    ^
                    └──► a `TextRun`: a request for each text┘

A request may be asked to end at any stage. Before it is accepted, the end is noted (`requested_end`), and it ends
when it is accepted."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import EngineBusy, EngineClosed, EngineError, failed
from petiole.gpu_worker.preparation.embeddings import TextInputs
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.preparation.preparation import Preparer
from petiole.gpu_worker.preparation.prompts import names_a_video
from petiole.gpu_worker.request import FinishReason, Request
from petiole.gpu_worker.request.handle import Controller, Handle
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Emission
from petiole.gpu_worker.scheduling.stopping import End, Finish
from petiole.gpu_worker.threads.detokenization import TextThread
from petiole.gpu_worker.threads.fan_out import TextRun
from petiole.gpu_worker.threads.inbox import CommandLoop, ThreadPool

Deliver = Callable[[list[Emission]], None]
OnFatal = Callable[[BaseException], None]
L = TypeVar("L", bound=CommandLoop)


class ServedModel(Protocol):
    """What is asked of a model here; a runtime is one."""

    @property
    def limits(self) -> ModelLimits: ...

    def adapter_at_hand(self, adapter: str) -> bool: ...


class OpenRequests(Generic[L]):
    """The open requests, and the threads that they pass: `intake`, `loop` and `text`. Thread-safe.

    open: the requests that were submitted. parts: the single texts of these that are in the engine. runs: of the
    open requests of texts; used on the text thread. n_texts: how many texts have been delivered.
    make_loop: makes the loop that owns the accepted sequences. on_fatal: called on the engine thread after a
    device failure, when every request has received its error.
    """

    def __init__(
        self,
        config: EngineConfig,
        controller: Controller,
        preparer: Preparer,
        model: ServedModel,
        make_loop: Callable[[Deliver, OnFatal], L],
        on_fatal: OnFatal,
        tracer: Tracer = NO_TRACE,
    ) -> None:
        self._controller, self._model, self._on_fatal = controller, model, on_fatal
        self._most_open = config.max_waiting + config.max_num_seqs
        self._window = 2 * config.max_num_seqs  # texts of one request that are in the engine at once
        self._lock = threading.Lock()
        self.closed = True  # not started yet, or shut down
        self.failure: BaseException | None = None
        self.open: dict[Handle, RequestOutput] = {}
        self.parts: dict[Handle, RequestOutput] = {}
        self.runs: dict[Handle, TextRun] = {}
        self.n_texts = 0
        self.text = TextThread(
            model.limits.model,
            self._stop_generating,
            self._forget,
            time.perf_counter,
            self.fail,
            config.stream_interval_ms / 1000,
        )
        self.loop = make_loop(self.text.post, self._on_device_lost)
        self.intake = PreparationThreads(
            preparer, model.adapter_at_hand, self._accept_later, self._begin_texts, self.text.refuse, tracer
        )

    # ------------------------------------------------------------ any thread

    def put(self, handle: Handle) -> None:
        """Queue a request. Refused, it ends at once: while the engine is not running, on the calling thread."""
        output = RequestOutput(handle)
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self.open[handle] = output
                self.intake.put(output)
        if refusal is not None:
            self._refuse(output, refusal)

    def close(self) -> list[RequestOutput] | None:
        """Accept no more requests. Returns the open ones of texts, whose runs submit texts until they end; None if
        this happened before."""
        with self._lock:
            if self.closed:
                return None
            self.closed = True
            return [output for output in self.open.values() if output.handle.request.texts is not None]

    def all(self) -> list[RequestOutput]:
        return [*self.open.values(), *self.parts.values()]

    def end_later(self, handle: Handle, end: End) -> None:
        output = self.open.get(handle) or self.parts.get(handle)
        if output is not None:
            self.loop.post(lambda: self.end(output, end))

    def fail(self, error: BaseException) -> None:
        """End the loop as a device error does."""

        def fail() -> None:
            raise error

        self.loop.post(fail)

    def cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        """Cut an image on a preparation thread. Its outcome wakes the loop."""
        self.intake.cut(image, lambda outcome: self.loop.post(lambda: done(outcome)))

    def _refusal(self) -> EngineError | None:
        if self.failure is not None:
            return EngineError(f"the engine has failed: {self.failure!r}")
        if self.closed:
            return EngineClosed("the engine is not running")
        if len(self.open) >= self._most_open:
            return EngineBusy(f"{len(self.open)} requests are running or waiting")
        return None

    def _refuse(self, output: RequestOutput, error: BaseException) -> None:
        if self.closed:  # the text thread is not running
            output.ended = True
            output.handle._end(error)
        else:
            self.text.refuse(output, error)

    def _prepare(self, output: RequestOutput) -> None:
        """Have an accepted request prepared, or prepared again."""
        if not self.intake.put(output):
            self.text.refuse(output, EngineClosed("the engine is shutting down"))

    def _accept_later(self, seq: ScheduledSequence, output: RequestOutput) -> None:
        self.loop.post(lambda: self._accept(seq, output))

    # ------------------------------------------------------------ on the engine thread

    def _accept(self, seq: ScheduledSequence, output: RequestOutput) -> None:
        output.seq = seq
        state = self.loop.state
        try:
            state.enqueue(seq)
            end = output.requested_end
            if end is None and seq.generated:  # resumed tokens may already satisfy a stop condition
                end = seq.rules.cut((), seq.generated)[1]
            if end is None and output.stop is not None:
                end = Finish(FinishReason.STOP, output.stop)
            if end is not None:
                state.finalize(seq, end)
        except Exception as error:
            state.spoil(seq, error)
            state.audit()

    def end(self, output: RequestOutput, end: End) -> None:
        """End a request at any stage: before acceptance, waiting or running."""
        seq = output.seq
        if output.handle.request.texts is not None:
            self.text.call(lambda: self._end_texts(output, end))
        elif seq is None:
            output.requested_end = end
        else:
            self._finalize(seq, end)

    def end_all(self, end: End) -> None:
        """End all open requests, after the in-flight steps have been committed and their tokens delivered."""
        self.loop.drain()
        for output in self.all():
            self.end(output, end)

    def _finalize(self, seq: ScheduledSequence, end: End) -> None:
        if not seq.finalized:
            self.loop.state.finalize(seq, end)

    def _on_device_lost(self, error: BaseException) -> None:
        """End every accepted request with an error, then call `on_fatal`. Runs before any cleanup."""
        with self._lock:
            self.failure = error
            outputs = self.all()
        for output in outputs:
            self.text.refuse(output, EngineError(f"the engine has failed: {error!r}"))
        self.text.flush()
        self._on_fatal(error)

    # ------------------------------------------------------------ on the text thread

    def _stop_generating(self, seq: ScheduledSequence) -> None:
        self.loop.post(lambda: self._finalize(seq, Finish(FinishReason.STOP)))

    def _forget(self, handle: Handle) -> None:
        output = self.open.pop(handle, None) or self.parts.pop(handle, None)
        self.runs.pop(handle, None)
        if output is not None:  # sequence and output refer to each other: only a search for cycles would free them
            output.seq = None

    def _begin_texts(self, output: RequestOutput, texts: TextInputs, arrival_s: float) -> None:
        """Called on a preparation thread."""

        def begin() -> None:
            if output.ended:
                return
            if texts.prepared.fingerprint != self._model.limits.fingerprint:  # another model was loaded meanwhile
                self._prepare(output)
                return
            if (begun := self.runs.get(output.handle)) is not None:
                begun.start_over(texts)
                return
            run = self.runs[output.handle] = TextRun(
                output.handle,
                texts,
                self._put_text,
                partial(self.text.end, output),
                self._count_texts,
                window=self._window,
                arrival_s=arrival_s,
            )
            run.start() if output.requested_end is None else run.end(output.requested_end)

        self.text.call(begin)

    def _put_text(
        self, request: Request, *, on_admitted: Callable[[Handle], None], on_done: Callable[[Handle], None]
    ) -> Handle:
        """Queue one text of an accepted request. While the engine drains, too."""
        handle = Handle(request, self._controller, on_admitted=on_admitted, on_done=on_done)
        self.parts[handle] = output = RequestOutput(handle)
        self._prepare(output)
        return handle

    def _count_texts(self, n: int) -> None:
        self.n_texts += n

    def _end_texts(self, output: RequestOutput, end: End) -> None:
        if (run := self.runs.get(output.handle)) is not None:
            run.end(end)
        else:
            output.requested_end = end

    def change_model(self) -> None:
        """Before anything of the new model comes: no request of texts mixes two models."""
        for handle, run in tuple(self.runs.items()):
            output = self.open.get(handle)
            if run.reloaded(self._model.limits.fingerprint) and output is not None:
                self._prepare(output)


PREPARATION_THREADS = 2
VIDEO_THREADS = 2
ADAPTER_THREADS = 2


class PreparationThreads:
    """The way in: other threads than the engine's turn requests into sequences.

        put ──┬── preparation threads ──┬── accept: the sequence goes to the engine's inbox
              ├── video threads ────────┤
              └── adapter threads ──────┴── refuse: the request ends with its error

    Adapters are read from a disk or downloaded. A request that may have to wait for its adapter waits on the
    adapter threads, so it delays no request without an adapter, and no request whose adapter is at hand. Videos,
    whose files may take minutes to read, are prepared and cut on threads of their own, too.

    For each request they call `accept(seq, output)`, `accept_texts(output, texts, arrival_s)` for a request of
    texts, or `refuse(output, error)`. `adapter_at_hand` says whether the runtime has an adapter already.
    """

    def __init__(
        self,
        preparer: Preparer,
        adapter_at_hand: Callable[[str], bool],
        accept: Callable[[ScheduledSequence, RequestOutput], None],
        accept_texts: Callable[[RequestOutput, TextInputs, float], None],
        refuse: Callable[[RequestOutput, BaseException], None],
        tracer: Tracer = NO_TRACE,
    ) -> None:
        self.preparer = preparer
        self._adapter_at_hand = adapter_at_hand
        self._accept, self._accept_texts = accept, accept_texts
        self._refuse = refuse
        self._tracer = tracer
        self._arrivals = itertools.count()
        self._preparation = ThreadPool(PREPARATION_THREADS, "prepare")
        self._videos = ThreadPool(VIDEO_THREADS, "video")
        self._reading = ThreadPool(ADAPTER_THREADS, "adapter")

    def put(self, output: RequestOutput) -> bool:
        """Queue a request. Of two requests with equal priority, the one that was put first has the better rank.
        False once the threads are closed."""
        arrival, arrival_s = next(self._arrivals), time.perf_counter()
        adapter: object = output.handle.request.adapter  # not checked yet
        at_hand = not isinstance(adapter, str) or self._adapter_at_hand(adapter)
        threads = self._preparation if at_hand else self._reading
        if names_a_video(output.handle.request.messages):
            threads = self._videos
        return threads.put(lambda: self._prepare(output, arrival, arrival_s))

    def cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        """Cut an image into crops on a preparation thread, or a video thread, then call `done` there. If they have
        ended, the calling thread does both."""

        def work() -> None:
            try:
                assert image.cut is not None, "an image that came with its crops"
                with self._tracer.span("cut"):
                    outcome: PreparedImage | Exception = image.cut()
            except Exception as error:
                outcome = error
            except BaseException as error:
                outcome = EngineError(f"an image could not be cut into crops: {error!r}")
            done(outcome)

        if not (self._videos if image.video else self._preparation).put(work):
            work()

    def close(self) -> None:
        """Returns when every request that was put has been accepted or refused."""
        self._preparation.close()
        self._videos.close()
        self._reading.close()

    def _prepare(self, output: RequestOutput, arrival: int, arrival_s: float) -> None:
        request, adapter_key = output.handle.request, None
        accept: Callable[[], None]
        try:
            if request.texts is not None:
                texts = self.preparer.texts(request)
                prepared, accept = texts.prepared, partial(self._accept_texts, output, texts, arrival_s)
            else:
                seq = self.preparer.prepare(output, arrival, arrival_s)
                prepared, adapter_key = self.preparer.described(seq), seq.adapter_key
                accept = partial(self._accept, seq, output)
        except Exception as error:  # InvalidRequest, or any error of a chat template or tokenizer
            self._refuse(output, error)
        except BaseException as error:  # a panic: libraries in Rust raise a BaseException for it
            self._refuse(output, failed(request.request_id, error))
        else:
            output.handle._prepare(prepared, adapter_key)
            accept()
