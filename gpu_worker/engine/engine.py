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

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from petiole.cache import build_manager
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine.loading import load_parts, memory_that_suffices, reload_text, warm_up
from petiole.gpu_worker.engine.open_requests import OpenRequests
from petiole.gpu_worker.engine.serving import Serving
from petiole.gpu_worker.engine.statistics import imbalance, scheduler_stats
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.preparation.preparation import ConstraintCompiler, Preparer
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.runtime.interface import DRAFTED, ModelLimits, Runtime
from petiole.gpu_worker.runtime.memory.kv_tier import open_files, open_tier
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.speculation import HeadProposer, NgramProposer, Proposer
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.threads.history import RememberingSequence
from petiole.gpu_worker.threads.loop import EngineLoop


class Engine(Serving[EngineLoop]):
    """Serves requests from one model on one device. Thread-safe.

    The constructor loads the model. `start`, or a `with` statement, starts to serve. `Engine.load` does both.
    Loading and starting raise ModelError if the model cannot be served.

    `runtime`, `tokenizer` and `compile_constraint` replace what is loaded from `config.model` (used by tests). A
    runtime passed without a tokenizer serves token ids only. `proposer` drafts tokens in place of the model's head
    or prompt lookup. `tracer` collects a Chrome trace. `on_fatal` is called once, on the engine thread, after a
    device failure and after every request has received its error.
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
        self.config = config = config.decided(limits.batching).drafting_by(limits.drafts)
        _check_regions(config, limits)
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
        self._tier = open_tier(
            config, files, self.runtime, manager, lambda command: self._loop.post(command), tracer
        )
        self.scheduler = Scheduler(config, self.runtime, manager, tracer, self._cut, self._tier)
        preparer = Preparer(
            config,
            limits,
            tokenizer=self.tokenizer,
            compile_constraint=compile_constraint or parts.compile_constraint,
            proposer=proposer or (HeadProposer([DRAFTED] * limits.drafts) if limits.drafts else NgramProposer()),
            adapter_key=self.runtime.adapter_key,
            sequence=RememberingSequence if config.debug or tracer.enabled else ScheduledSequence,
        )
        slots = 1 if config.pipeline == "off" else 2
        make_loop = partial(EngineLoop, self.scheduler, tracer=tracer, slots=slots, debug=config.debug)
        self.serve(OpenRequests(config, self, preparer, self.runtime, make_loop, self._on_fatal, tracer))
        self.runtime.progress = self._loop.beat

    # ------------------------------------------------------------ lifecycle

    @classmethod
    def load(cls, config: EngineConfig, *, tracer: Tracer = NO_TRACE) -> Engine:
        """Load the model, and start to serve it."""
        return cls(config, tracer=tracer).start()

    def start(self) -> Engine:
        """Start the threads, and warm up the model. Returns once the engine can serve requests."""
        super().start()
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

    def _close(self) -> None:
        if self._tier is not None:
            self._tier.close()
        self.runtime.close()

    def _cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        self._requests.cut(image, done)

    # ------------------------------------------------------------ control

    def pause(self) -> None:
        """Drain the pipeline and stop launching steps; new requests queue. Returns when the device is idle."""

        def pause() -> None:
            self._loop.drain()
            self.runtime.synchronize()
            self._loop.paused = True

        self._call(pause)

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

    # ------------------------------------------------------------ status

    @property
    def limits(self) -> ModelLimits:
        return self.runtime.limits

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
            "encoded_images": self.runtime.encoded_images(),
            "feature_hits": self.runtime.feature_hits(),
            "expert_imbalance": round(imbalance(self.expert_tokens()), 4),
        }


def _check_regions(config: EngineConfig, limits: ModelLimits) -> None:
    """Check that a prefill step can hold the largest region, because no chunk may split one. Raises ModelError."""
    if limits.images is None:
        return
    sizes = {name: getattr(config, name) for name in ("chunk_size", "max_num_batched_tokens")}
    sizes["max_model_len"] = limits.max_model_len
    if (found := limits.images.too_small(sizes)) is not None:
        name, least = found
        what = f"must be at least {least}, to hold an image of {limits.model}"
        raise ModelError(f"{name}: {what}, got {sizes[name]}")
