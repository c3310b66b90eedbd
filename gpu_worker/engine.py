"""The engine: serves requests from one model on one device.

    with Engine(EngineConfig(model="petiole-tiny", device="cpu")) as engine:
        handle = engine.submit(Request(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=8, temperature=0)))
        for delta in handle: ...

    submit --> preparation pool --inbox--> engine thread --emissions--> text thread --> handles, callbacks
               validate, tokenize          plan, launch,                detokenize, match stop strings,
                                           sample, commit               end each request exactly once

One thread, the engine thread, owns the device, the page table and the scheduler. All work reaches it through its
inbox; it sleeps on a condition variable while it is idle. `docs/engine.md` describes the loop, its invariants and
its timing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from petiole.cache import GroupUsage, build_manager
from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.errors import EngineBusy, EngineClosed, EngineError, HandedBack, ModelError
from petiole.gpu_worker.handle import Handle
from petiole.gpu_worker.loading import load_parts, memory_that_suffices, reload_text, warm_up
from petiole.gpu_worker.request import Delta, FinishReason, Request, Result
from petiole.gpu_worker.request.images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.interface import ModelLimits, Runtime
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.scheduled import ScheduledSequence
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.stopping import End, Finish
from petiole.gpu_worker.speculation import NgramProposer, Proposer
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.threads.intake import PreparationThreads
from petiole.gpu_worker.threads.loop import EngineLoop
from petiole.gpu_worker.threads.preparation import ConstraintCompiler, Preparer
from petiole.gpu_worker.threads.text import RequestOutput, TextThread
from petiole.gpu_worker.threads.texts import TextInputs, TextRun
from petiole.gpu_worker.tracing import NO_TRACE, Tracer
from petiole.outputs import Prepared

T = TypeVar("T")

HISTORY_LENGTH = 64
"""Transitions of a sequence that a failed invariant, a fatal error (with `debug`) and a trace show."""


class Engine:
    """Serves requests from one model on one device. Thread-safe.

    The constructor loads the model. `start`, or a `with` statement, starts to serve. `Engine.load` does both.
    Loading and starting raise ModelError if the model cannot be served.

    `runtime`, `tokenizer` and `compile_constraint` replace what is loaded from `config.model` (used by tests). A
    runtime passed without a tokenizer serves token ids only. `proposer` drafts tokens in place of prompt lookup.
    `tracer` collects a Chrome trace. `on_fatal` is called once, on the engine thread, after a device failure and
    after every request has received its error.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        runtime: Runtime | None = None,
        tokenizer: Tokenizer | None = None,
        compile_constraint: ConstraintCompiler | None = None,
        proposer: Proposer | None = None,
        tracer: Tracer = NO_TRACE,
    ) -> None:
        parts = load_parts(config, runtime, tokenizer, tracer)
        limits = parts.runtime.limits
        if limits.whole_texts:
            config = config.whole_texts(limits.max_model_len - 1)
        self.config = config = config.decided(limits.batching)
        _check_regions(config, limits)
        self.on_fatal: Callable[[BaseException], None] | None = None
        self.failure: BaseException | None = None
        self.tracer = tracer
        self.runtime, self.tokenizer = parts.runtime, parts.tokenizer
        self._warms_up = runtime is None
        self._own_text = tokenizer is None and compile_constraint is None
        self._open: dict[Handle, RequestOutput] = {}
        self._parts: dict[Handle, RequestOutput] = {}  # the texts of open requests that are in the engine
        self._runs: dict[Handle, TextRun] = {}  # of open requests of texts; used on the text thread
        self._n_texts = 0
        self._lock = threading.Lock()
        self._closed = True  # not started yet, or shut down
        manager = build_manager(
            config.prefix_cache,
            limits.n_pages,
            limits.page_size,
            limits.max_batch_size,
            -(-limits.max_model_len // limits.page_size),
            max_cached_pages=config.prefix_cache_max_pages,
            windows=limits.windows,
            snapshots=limits.snapshots,
            longest_step=config.longest_step,
        )
        self.scheduler = Scheduler(config, self.runtime, manager, tracer, self._cut)
        preparer = Preparer(
            config,
            limits,
            tokenizer=self.tokenizer,
            compile_constraint=compile_constraint or parts.compile_constraint,
            proposer=proposer or NgramProposer(),
            adapter_key=self.runtime.adapter_key,
            history_length=HISTORY_LENGTH if config.debug or tracer.enabled else 0,
        )
        interval_s = config.stream_interval_ms / 1000
        self._text = TextThread(
            limits.model, self._stop_generating, self._forget, time.perf_counter, self._fail, interval_s
        )
        pipeline = PipelineState[ScheduledSequence](1 if config.pipeline == "off" else 2)
        self._loop = EngineLoop(
            self.scheduler, pipeline, self._text.post, self._on_device_lost, tracer, config.debug
        )
        self.runtime.progress = self._loop.beat
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)
        self._intake = PreparationThreads(
            preparer,
            self.runtime.adapter_at_hand,
            self._accept_later,
            self._begin_texts,
            self._text.refuse,
            tracer,
        )

    # ------------------------------------------------------------ lifecycle

    @classmethod
    def load(cls, config: EngineConfig, *, tracer: Tracer = NO_TRACE) -> Engine:
        """Load the model, and start to serve it."""
        return cls(config, tracer=tracer).start()

    def start(self) -> Engine:
        """Start the threads, and warm up the model. Returns once the engine can serve requests."""
        self._text.start()
        self._thread.start()
        self._closed = False
        if self._warms_up:
            self._warm_up()
        self.tracer.reset()
        return self

    def _warm_up(self) -> None:
        try:
            with memory_that_suffices():
                self._call(lambda: warm_up(self.runtime))
        except BaseException:
            self.shutdown(drain=False)
            raise

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(drain=error is None)

    def shutdown(self, drain: bool = True, handback: bool = False) -> None:
        """Stop accepting requests, end the open ones and stop the threads. Returns when all have stopped.

        `drain` runs open requests to completion. Otherwise they end with HandedBack if `handback` is set, and are
        cancelled if not. A second call does nothing.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            texts = [output for output in self._open.values() if output.handle.request.texts is not None]
        end: End = HandedBack("the engine is shutting down") if handback else Finish(FinishReason.CANCELLED)
        if texts:
            self._loop.post(self._loop.unpause)
        for output in texts:  # their runs submit texts until they end
            if not drain:
                self._end(output, end)
                continue
            with suppress(Exception):
                output.handle.result()
        self._text.flush()
        self._intake.close()
        if not drain:
            self._loop.post(lambda: self._end_all(end))
        self._loop.post(self._loop.stop_when_done)
        if threading.current_thread() is not self._thread:  # `on_fatal` may call this on the engine thread
            self._thread.join()
        self._text.flush()
        for output in self._outputs():  # empty unless the loop has failed
            self._text.refuse(output, EngineClosed("the engine has shut down"))
        self._text.close()
        self.runtime.close()

    # ------------------------------------------------------------ requests

    def submit(
        self,
        request: Request,
        *,
        on_prepared: Callable[[Handle, Prepared], None] | None = None,
        on_delta: Callable[[Handle, Delta], None] | None = None,
        on_admitted: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Queue a request. Never blocks. Invalid input does not raise: `InvalidRequest` is the handle's error.

        Callbacks run on the text thread, in order; `on_done` runs last and exactly once. They must return quickly.
        `on_prepared` runs first, on a preparation thread: the request is valid, and waits for its admission.
        A request refused while the engine is not running gets its `on_done` on the calling thread.
        """
        handle = Handle(
            request, self, on_prepared=on_prepared, on_delta=on_delta, on_admitted=on_admitted, on_done=on_done
        )
        output = RequestOutput(handle)
        with self._lock:
            refusal = self._refusal()
            if refusal is None:
                self._open[handle] = output
                self._intake.put(output)
        if refusal is not None:
            self._refuse(output, refusal)
        return handle

    def _submit_text(
        self, request: Request, *, on_admitted: Callable[[Handle], None], on_done: Callable[[Handle], None]
    ) -> Handle:
        """Queue one text of an accepted request. While the engine drains, too."""
        handle = Handle(request, self, on_admitted=on_admitted, on_done=on_done)
        self._parts[handle] = output = RequestOutput(handle)
        self._prepare(output)
        return handle

    def _prepare(self, output: RequestOutput) -> None:
        """Have an accepted request prepared, or prepared again."""
        if not self._intake.put(output):
            self._text.refuse(output, EngineClosed("the engine is shutting down"))

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Submit all requests and return their results in order. Raises the first request's error."""
        return [handle.result() for handle in [self.submit(request) for request in requests]]

    def _refusal(self) -> EngineError | None:
        if self.failure is not None:
            return EngineError(f"the engine has failed: {self.failure!r}")
        if self._closed:
            return EngineClosed("the engine is not running")
        if len(self._open) >= self.config.max_waiting + self.config.max_num_seqs:
            return EngineBusy(f"{len(self._open)} requests are running or waiting")
        return None

    def _refuse(self, output: RequestOutput, error: BaseException) -> None:
        if self._closed:  # the text thread is not running
            output.ended = True
            output.handle._end(error)
        else:
            self._text.refuse(output, error)

    def _begin_texts(self, output: RequestOutput, texts: TextInputs, arrival_s: float) -> None:
        def begin() -> None:
            if output.ended:
                return
            if texts.prepared.fingerprint != self.limits.fingerprint:  # another model was loaded meanwhile
                self._prepare(output)
                return
            if (begun := self._runs.get(output.handle)) is not None:
                begun.start_over(texts)
                return
            run = self._runs[output.handle] = TextRun(
                output.handle,
                texts,
                self._submit_text,
                partial(self._text.end, output),
                self._count_texts,
                window=2 * self.config.max_num_seqs,
                arrival_s=arrival_s,
            )
            run.start() if output.requested_end is None else run.end(output.requested_end)

        self._text.call(begin)

    def _count_texts(self, n: int) -> None:
        """On the text thread."""
        self._n_texts += n

    def _outputs(self) -> list[RequestOutput]:
        return [*self._open.values(), *self._parts.values()]

    def _accept_later(self, seq: ScheduledSequence, output: RequestOutput) -> None:
        self._loop.post(lambda: self._accept(seq, output))

    # ------------------------------------------------------------ on the engine thread

    def _cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        """Cut an image on a preparation thread. Its outcome wakes the loop."""
        self._intake.cut(image, lambda outcome: self._loop.post(lambda: done(outcome)))

    def _accept(self, seq: ScheduledSequence, output: RequestOutput) -> None:
        output.seq = seq
        state = self.scheduler.state
        try:
            state.enqueue(seq)
            end = output.requested_end
            if end is None and seq.generated:  # resumed tokens may already satisfy a stop condition
                end = seq.rules.cut((), seq.generated)[1]
        except Exception as error:
            state.fail(seq, error)
            return
        if end is None and output.stop is not None:
            end = Finish(FinishReason.STOP, output.stop)
        if end is not None:
            state.finalize(seq, end)

    def _end(self, output: RequestOutput, end: End) -> None:
        """End a request at any stage: before acceptance, waiting or running."""
        seq = output.seq
        if output.handle.request.texts is not None:
            self._text.call(lambda: self._end_texts(output, end))
        elif seq is None:
            output.requested_end = end
        else:
            self._finalize(seq, end)

    def _end_texts(self, output: RequestOutput, end: End) -> None:
        """On the text thread."""
        if (run := self._runs.get(output.handle)) is not None:
            run.end(end)
        else:
            output.requested_end = end

    def _change_model(self) -> None:
        """On the text thread, before anything of the new model comes: no request of texts mixes two models."""
        for handle, run in tuple(self._runs.items()):
            output = self._open.get(handle)
            if run.reloaded(self.limits.fingerprint) and output is not None:
                self._prepare(output)

    def _finalize(self, seq: ScheduledSequence, end: End) -> None:
        if not seq.finalized:
            self.scheduler.state.finalize(seq, end)

    def _end_all(self, end: End) -> None:
        """End all open requests, after the in-flight steps have been committed and their tokens delivered."""
        self._loop.drain()
        for output in self._outputs():
            self._end(output, end)

    def _fail(self, error: BaseException) -> None:
        """End the loop as a device error does. Called on another thread."""

        def fail() -> None:
            raise error

        self._loop.post(fail)

    def _on_device_lost(self, error: BaseException) -> None:
        """End every accepted request with an error, then call `on_fatal`. Runs before any cleanup."""
        with self._lock:
            self.failure = error
            outputs = self._outputs()
        for output in outputs:
            self._text.refuse(output, EngineError(f"the engine has failed: {error!r}"))
        self._text.flush()
        if self.on_fatal is not None:
            self.on_fatal(error)

    # ------------------------------------------------------------ from handles and the text thread

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None:
        """See `Handle.cancel`."""
        self._end_later(handle, Finish(reason))

    def hand_back_request(self, handle: Handle) -> None:
        """See `Handle.hand_back`."""
        self._end_later(handle, HandedBack(f"request {handle.request.request_id} was handed back"))

    def _end_later(self, handle: Handle, end: End) -> None:
        output = self._open.get(handle) or self._parts.get(handle)
        if output is not None:
            self._loop.post(lambda: self._end(output, end))

    def _stop_generating(self, seq: ScheduledSequence) -> None:
        self._loop.post(lambda: self._finalize(seq, Finish(FinishReason.STOP)))

    def _forget(self, handle: Handle) -> None:
        output = self._open.pop(handle, None) or self._parts.pop(handle, None)
        self._runs.pop(handle, None)
        if output is not None:
            output.seq = (
                None  # the sequence refers to the output: a cycle would keep both until a garbage collection
            )

    # ------------------------------------------------------------ control

    def pause(self) -> None:
        """Drain the pipeline and stop launching steps; new requests queue. Returns when the device is idle."""

        def pause() -> None:
            self._loop.drain()
            self.runtime.synchronize()
            self._loop.paused = True

        self._call(pause)

    def resume(self) -> None:
        self._call(self._loop.unpause)

    def prepare_reload(self, model: str) -> Callable[[], None]:
        """Find the weights of `model`, downloading them if necessary, while the engine goes on serving.

        Returns a function that replaces the weights: it drains the pipeline, flushes the prefix cache, requeues
        the running sequences for recompute, and loads. Requests of texts do not mix two models: see `TextRun`.
        If the loading fails, the weights are lost, and the next step fails as after a device error. Raises
        ModelError if the model is not compatible with the current one."""
        try:
            load = self.runtime.prepare_reload(model)
            text = reload_text(self.config, self.tokenizer, model) if self._own_text and self.tokenizer else None
        except ModelError:
            raise
        except Exception as error:  # for example because of sizes in a configuration that no tensor can have
            raise ModelError(f"{model} cannot be read: {type(error).__name__}: {error}") from error

        def reload() -> None:
            self._loop.drain()
            self.scheduler.requeue_all()
            load(self._loop.beat)
            preparer = self._intake.preparer
            if text is not None:
                self.tokenizer, preparer.compile_constraint = text
                preparer.tokenizer = self.tokenizer
            self.scheduler.state.limits = preparer.limits = self.runtime.limits
            self._text.model = self.runtime.limits.model
            self._text.call(self._change_model)
            self._text.flush()

        return lambda: self._call(reload)

    def reload(self, model: str) -> None:
        """Replace the weights: see `prepare_reload`. After a ModelError the current model goes on serving."""
        self.prepare_reload(model)()

    def check_invariants(self) -> None:
        """Run the conservation and pipeline checks on the engine thread; raises AssertionError."""
        self._call(self._loop.check_invariants)

    def _call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine thread, between two rounds, and return its result.

        Raises its exception, or EngineClosed if the engine thread is not running.
        """
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def command() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        if not self._thread.is_alive():
            raise EngineClosed("the engine is not running")
        self._loop.post(command)
        while not future.done() and self._thread.is_alive():
            wait([future], timeout=1.0)
        if not future.done():
            raise EngineClosed("the engine has stopped")
        return future.result()

    # ------------------------------------------------------------ status

    def tokens_of(self, request: Request) -> list[int]:
        """The tokens of a request's prompt, as the request would be generated from, with IMAGE at each position of
        an image. They may be more than the context has room for. Runs on the calling thread. Raises
        InvalidRequest."""
        return self._intake.preparer.tokens_of(request)

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Runs on the calling thread. Raises InvalidRequest."""
        return self._intake.preparer.text_of(token_ids, skip_special_tokens=skip_special_tokens)

    def text_lengths(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """For each of these tokens, of an output of this request: how many characters the text up to it has. Runs
        on the calling thread. Raises InvalidRequest."""
        return self._intake.preparer.text_lengths(request, token_ids)

    def facts(self) -> dict[str, Any]:
        """What the model is and takes, as far as its checkpoint says so."""
        limits, text = self.limits, None if self.tokenizer is None else self.tokenizer.facts
        known: dict[str, Any] = {} if text is None else dict(text)
        if limits.processor is not None:  # it answers conversations by its skills, without a chat template
            known |= {"chat": True, "tools": False}
        if (texts := limits.texts) is not None:
            known |= {
                "dimensions": 0 if texts.labels else texts.dimensions,
                "labels": list(texts.labels),
                "prompts": sorted(texts.prompts),
                "chat": False,
                "tools": False,
            }
        return {
            "max_model_len": limits.max_model_len if texts is None else texts.max_tokens,
            "vocab_size": limits.vocab_size,
            "images": limits.images is not None,
            "embeddings": texts is not None and not texts.labels,
            "takes_adapters": self.config.lora_slots > 0,
            **known,
        }

    @property
    def limits(self) -> ModelLimits:
        return self.runtime.limits

    @property
    def healthy(self) -> bool:
        return self.failure is None

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop's last round; 0 while the loop is idle or the engine is closed."""
        if self._closed or self._loop.asleep:
            return 0.0
        return time.monotonic() - self._loop.last_round_s

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        """For each layer with experts, how many positions each of its experts has computed since the start."""
        return self.runtime.expert_tokens()

    def stats(self) -> dict[str, float | int | str]:
        """Counters and gauges. Read without a lock, so the values may come from different instants."""
        state = self.scheduler.state
        counters, usage = state.counters, state.manager.usage()
        return {
            "model": self.limits.model,
            "device": self.limits.device,
            **asdict(self.limits.computing),
            "healthy": int(self.healthy),
            "paused": int(self._loop.paused),
            "slots": self.config.max_num_seqs,
            "running": len(state.running) + len(state.prefilling),
            "waiting": len(state.waiting),
            "held_back": self.scheduler.planner.budget.held_back,
            "open": len(self._open),
            "rows_held": usage.rows_held,
            "pages_total": usage.pages_total,
            "pages_free": usage.pages_free,
            "pages_cached": usage.pages_cached,
            "pages_private": usage.pages_private,
            "prefix_hit_tokens": usage.cache.hit_tokens,
            "prefix_hit_rate": round(usage.cache.hit_rate, 4),
            "evicted_pages": usage.cache.evicted_pages,
            **{name: number for group in usage.groups for name, number in _facts_of(group)},
            **({} if usage.states is None else asdict(usage.states, dict_factory=_of_states)),
            "steps": counters.steps,
            "prefill_steps": counters.prefill_steps,
            "prompt_tokens": counters.prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "texts": self._n_texts,
            "zombie_outputs": counters.zombie_outputs,
            "preemptions": counters.preemptions,
            "encoded_images": counters.encoded_images,
            "image_hits": counters.image_hits,
            "encode_s": round(counters.encode_s, 4),
            "finished": counters.finished,
            "draft_tokens": counters.speculation.drafted,
            "accepted_draft_tokens": counters.speculation.accepted,
            "expert_imbalance": round(imbalance(self.expert_tokens()), 4),
        }


def _facts_of(group: GroupUsage) -> Iterator[tuple[str, int]]:
    """The gauges of a group of layers with a window."""
    pages = ("pages_total", "pages_free", "pages_cached", "pages_held", "pages_evicted")
    for name in (*pages, "hit_tokens", "missed_tokens"):
        yield f"window_{group.window}_{name}", getattr(group, name)


def _of_states(facts: list[tuple[str, int]]) -> dict[str, int]:
    """The gauges of layers that keep a state."""
    return {f"state_{name}" if name.endswith("_tokens") else name: number for name, number in facts}


def imbalance(expert_tokens: Sequence[Sequence[int]]) -> float:
    """How many times as many positions the busiest expert of a layer computes as the mean one, on the average of
    layers. 1: all compute equally many; 0: no expert has computed any."""
    busy = [max(layer) * len(layer) / sum(layer) for layer in expert_tokens if sum(layer)]
    return sum(busy) / len(busy) if busy else 0.0


def _check_regions(config: EngineConfig, limits: ModelLimits) -> None:
    """Check that a prefill step can hold the largest region, because no chunk may split one. Raises ModelError."""
    if limits.images is None:
        return
    region = limits.images.max_region
    for name, value, needed in (
        ("chunk_size", config.chunk_size, region),
        ("max_num_batched_tokens", config.max_num_batched_tokens, region),
        ("max_model_len", limits.max_model_len, region + 2),  # a token of the question, one of the answer
    ):
        if value < needed:
            raise ModelError(f"{name}: must be at least {needed}, to hold an image of {limits.model}, got {value}")
