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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

from petiole.cache import build_manager
from petiole.contract.results.outputs import Prepared
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine.loading import load_parts, memory_that_suffices, reload_text, warm_up
from petiole.gpu_worker.engine.open_requests import OpenRequests
from petiole.gpu_worker.engine.statistics import facts_of, imbalance, scheduler_stats
from petiole.gpu_worker.exceptions import EngineClosed, HandedBack, ModelError
from petiole.gpu_worker.preparation.preparation import ConstraintCompiler, Preparer
from petiole.gpu_worker.request import Delta, FinishReason, Request, Result
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.interface import ModelLimits, Runtime
from petiole.gpu_worker.runtime.memory.kv_tier import open_files, open_tier
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.stopping import End, Finish
from petiole.gpu_worker.speculation import NgramProposer, Proposer
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.tracing import NO_TRACE, Tracer

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
        files = open_files(config)
        parts = load_parts(config, runtime, tokenizer, tracer)
        limits = parts.runtime.limits
        if limits.whole_texts:
            config = config.whole_texts(limits.max_model_len - 1)
        self.config = config = config.decided(limits.batching)
        _check_regions(config, limits)
        self.on_fatal: Callable[[BaseException], None] | None = None
        self.tracer = tracer
        self.runtime, self.tokenizer = parts.runtime, parts.tokenizer
        self._warms_up = runtime is None
        self._own_text = tokenizer is None and compile_constraint is None
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
        self._tier = open_tier(config, files, self.runtime, manager, lambda command: self._loop.post(command))
        self.scheduler = Scheduler(config, self.runtime, manager, tracer, self._cut, self._tier)
        preparer = Preparer(
            config,
            limits,
            tokenizer=self.tokenizer,
            compile_constraint=compile_constraint or parts.compile_constraint,
            proposer=proposer or NgramProposer(),
            adapter_key=self.runtime.adapter_key,
            history_length=HISTORY_LENGTH if config.debug or tracer.enabled else 0,
        )
        self._requests = OpenRequests(config, self, self.scheduler, preparer, self.runtime, self._on_fatal, tracer)
        self._intake, self._loop, self._text = self._requests.intake, self._requests.loop, self._requests.text
        self.runtime.progress = self._loop.beat
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)

    # ------------------------------------------------------------ lifecycle

    @classmethod
    def load(cls, config: EngineConfig, *, tracer: Tracer = NO_TRACE) -> Engine:
        """Load the model, and start to serve it."""
        return cls(config, tracer=tracer).start()

    def start(self) -> Engine:
        """Start the threads, and warm up the model. Returns once the engine can serve requests."""
        self._text.start()
        self._thread.start()
        self._requests.closed = False
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
        if (texts := self._requests.close()) is None:
            return
        end: End = HandedBack("the engine is shutting down") if handback else Finish(FinishReason.CANCELLED)
        if texts:
            self._loop.post(self._loop.unpause)
        for output in texts:  # their runs submit texts until they end
            if not drain:
                self._requests.end(output, end)
                continue
            with suppress(Exception):
                output.handle.result()
        self._text.flush()
        self._intake.close()
        if not drain:
            self._loop.post(lambda: self._requests.end_all(end))
        self._loop.post(self._loop.stop_when_done)
        if threading.current_thread() is not self._thread:  # `on_fatal` may call this on the engine thread
            self._thread.join()
        self._text.flush()
        for output in self._requests.all():  # empty unless the loop has failed
            self._text.refuse(output, EngineClosed("the engine has shut down"))
        self._text.close()
        if self._tier is not None:
            self._tier.close()
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
        self._requests.put(handle)
        return handle

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Submit all requests and return their results in order. Raises the first request's error."""
        return [handle.result() for handle in [self.submit(request) for request in requests]]

    def _cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        self._requests.cut(image, done)

    def _on_fatal(self, error: BaseException) -> None:
        if self.on_fatal is not None:
            self.on_fatal(error)

    # ------------------------------------------------------------ from handles

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None:
        """See `Handle.cancel`."""
        self._requests.end_later(handle, Finish(reason))

    def hand_back_request(self, handle: Handle) -> None:
        """See `Handle.hand_back`."""
        self._requests.end_later(handle, HandedBack(f"request {handle.request.request_id} was handed back"))

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
            self._text.call(self._requests.change_model)
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
        return facts_of(self.limits, self.tokenizer, self.config)

    @property
    def limits(self) -> ModelLimits:
        return self.runtime.limits

    @property
    def failure(self) -> BaseException | None:
        """The error that has ended the engine."""
        return self._requests.failure

    @property
    def healthy(self) -> bool:
        return self.failure is None

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop's last round; 0 while the loop is idle or the engine is closed."""
        if self._requests.closed or self._loop.asleep:
            return 0.0
        return time.monotonic() - self._loop.last_round_s

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        """For each layer with experts, how many positions each of its experts has computed since the start."""
        return self.runtime.expert_tokens()

    def stats(self) -> dict[str, float | int | str]:
        """Counters and gauges. Read without a lock, so the values may come from different instants."""
        return {
            "model": self.limits.model,
            "device": self.limits.device,
            **asdict(self.limits.computing),
            "healthy": int(self.healthy),
            "paused": int(self._loop.paused),
            "slots": self.config.max_num_seqs,
            "open": len(self._requests.open),
            "texts": self._requests.n_texts,
            **scheduler_stats(self.scheduler),
            "encoded_images": self.scheduler.state.counters.encoded_images - self.runtime.feature_hits(),
            "feature_hits": self.runtime.feature_hits(),
            "expert_imbalance": round(imbalance(self.expert_tokens()), 4),
        }


def _check_regions(config: EngineConfig, limits: ModelLimits) -> None:
    """Check that a prefill step can hold the largest region, because no chunk may split one. Raises ModelError."""
    if limits.images is None:
        return
    region = limits.images.max_region  # 0 for causal images
    for name, value, needed in (
        ("chunk_size", config.chunk_size, region),
        ("max_num_batched_tokens", config.max_num_batched_tokens, region),
        ("max_model_len", limits.max_model_len, region + 2),  # a token of the question, one of the answer
    ):
        if value < needed:
            raise ModelError(f"{name}: must be at least {needed}, to hold an image of {limits.model}, got {value}")
