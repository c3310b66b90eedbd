"""Loads the runtime, tokenizer and constraint compiler of the configured model, and warms a runtime up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import numpy as np

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker import constraints
from petiole.gpu_worker.exceptions import InvalidRequest, MachineError, ModelError
from petiole.gpu_worker.preparation import images
from petiole.gpu_worker.preparation.preparation import ConstraintCompiler
from petiole.gpu_worker.request import Constraint, SamplingParams
from petiole.gpu_worker.request.prepared_images import IMAGE, ImageLimits, RequestImage, rotary_positions
from petiole.gpu_worker.request.skills import Pictures
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.device.tracing import Tracer
from petiole.gpu_worker.runtime.interface import (
    FEATURES,
    NO_UPDATES,
    PENDING,
    VECTORS,
    EncodeInput,
    Int32Array,
    KeptInput,
    PageUpdates,
    Progress,
    RowBinding,
    Runtime,
    StateUpdates,
    StepBatch,
    nothing,
)
from petiole.gpu_worker.scheduling.batching import encode_batch
from petiole.gpu_worker.text import Tokenizer, load_tokenizer

_PROMPT, _DECODES = 16, 3
"""Tokens of the prompt, and decodes after it, of a warm-up."""
_NO_MEMORY = ("out of memory", "allocate memory")
"""Texts in torch's RuntimeErrors for exhausted GPU and host memory."""


Text = TypeVar("Text")


class Parts(NamedTuple):
    runtime: Runtime
    tokenizer: Tokenizer | None
    compile_constraint: ConstraintCompiler | None


def load_runtime(config: EngineConfig, tracer: Tracer, progress: Progress = nothing) -> Runtime:
    """Load the model and allocate its memory on the configured device. progress: called before each tensor. Raises
    ModelError, and what `progress` raises."""
    from petiole.gpu_worker.runtime.runtime import ModelRuntime

    device = open_device(config.device)
    if tracer.enabled:
        device.on_span = tracer.record_device
    with memory_that_suffices():
        return ModelRuntime(config, device=device, loading=progress)


def load_beside(
    config: EngineConfig, tracer: Tracer, text: Callable[[EngineConfig], Text]
) -> tuple[Runtime, Text]:
    """The runtime, and what a thread makes of the model's text while the weights load. If that fails, no further
    weights are read. Raises ModelError."""
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model

    resolve_model(config.model, config.revision)  # one of them downloads it
    with ThreadPoolExecutor(1, "vocabulary") as beside:
        made = beside.submit(text, config)

        def look() -> None:
            if made.done():
                made.result()

        runtime = load_runtime(config, tracer, look)
        try:
            return runtime, made.result()
        except BaseException:
            runtime.close()
            raise


def load_text(config: EngineConfig) -> tuple[Tokenizer, ConstraintCompiler]:
    """The model's tokenizer and constraint compiler. A thread warms up the compiler while the weights load."""
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model

    tokenizer = load_tokenizer(resolve_model(config.model, config.revision))
    Thread(target=constraints.warm_up, args=(tokenizer,), name="constraints").start()
    return tokenizer, partial(constraints.compile_constraint, tokenizer=tokenizer)


def reload_text(
    config: EngineConfig, present: Tokenizer, model: str
) -> tuple[Tokenizer, ConstraintCompiler] | None:
    """The tokenizer and constraint compiler of a checkpoint that replaces the weights; None if it has none, so
    that the current ones stay. Raises ModelError if the new tokenizer gives another text to a token of the current
    one, because running prompts and outputs consist of such tokens."""
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model

    folder = resolve_model(model, config.revision)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(folder)
    known, new = (one.backend.get_vocab(with_added_tokens=True) for one in (present, tokenizer))
    if not known.items() <= new.items():
        raise ModelError(f"{model} has another tokenizer than the model served; start a new engine for it")
    return tokenizer, partial(constraints.compile_constraint, tokenizer=tokenizer)


def load_parts(
    config: EngineConfig, runtime: Runtime | None, tokenizer: Tokenizer | None, tracer: Tracer
) -> Parts:
    """Load the parts that are None. A runtime passed without a tokenizer serves token ids only."""
    if runtime is not None and tokenizer is None:
        return Parts(runtime, None, None)
    given = runtime
    if tokenizer is not None:
        compiler: ConstraintCompiler = partial(constraints.compile_constraint, tokenizer=tokenizer)
        runtime = load_runtime(config, tracer) if runtime is None else runtime
    else:
        runtime, (tokenizer, compiler) = load_beside(config, tracer, load_text)
    if given is None:
        with suppress(InvalidRequest):  # some models do not support constraints
            compiler(Constraint("choice", ["a"]))
    return Parts(runtime, tokenizer, compiler)


@contextmanager
def memory_that_suffices() -> Iterator[None]:
    """A context in which exhausted memory raises MachineError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            found, _, _ = str(error).partition(". If reserved but")  # torch's advice does not help here
            raise MachineError(
                f"it does not fit into memory: {found.splitlines()[0] if found else 'out of memory'}; a smaller "
                f"model, weight_quantization or fewer max_num_seqs and max_num_batched_tokens take less"
            ) from error
        raise


def warm_up(runtime: Runtime) -> None:
    """Run a prefill and some decodes in both slots, with log-probabilities and without. So one-time costs
    (kernels, buffers, caches) do not delay the first request. Raises ModelError if the logits are not numbers.
    Uses row 1 and the first pages: nobody uses them yet, and every request writes its pages before it reads them.
    Called on the thread that serves, because cuBLAS makes a handle for each thread at its first product."""
    limits = runtime.limits
    n = min(_PROMPT, limits.max_model_len - _DECODES, limits.positions_that_fit - _DECODES)
    if n < 1:
        return
    if limits.texts is not None:
        _run(runtime, np.ones(n, np.int32), 0, SamplingParams(temperature=0.0))
        runtime.synchronize()
        return
    for logprobs in (0, None):
        sampling = SamplingParams(temperature=1.0, top_p=0.9, logprobs=logprobs)
        _run(runtime, np.ones(n, np.int32), _DECODES, sampling)
    if limits.images is not None and limits.pictures is not None:
        _run_image(runtime, limits.images, limits.pictures)
    runtime.synchronize()


def _run_image(runtime: Runtime, limits: ImageLimits, pictures: Pictures) -> None:
    """Encode a white picture, then run a prefill that ends after the image, and a decode. This also loads the
    libraries that read files. An image that does not fit into the KV cache is left out."""
    picture = images.warm_up()
    layout = pictures.layout(*picture.size, "a white picture", limits.max_positions)
    prepared = pictures.prepared(picture, 0, layout)
    image, begin = RequestImage.of(prepared), limits.lead
    prompt = np.full(begin + image.n_positions, IMAGE, np.int32)
    prompt[:begin] = 1
    if len(prompt) >= runtime.limits.positions_that_fit:
        return
    encode = encode_batch([EncodeInput(0, prepared)])
    runtime.launch_forward(0, encode)
    runtime.launch_sampling(0, encode, None).wait()
    rotary = rotary_positions(len(prompt), {begin: image})
    found = [(0, one.begin, one.end) for one in limits.regions({begin: image}) if one.bidirectional]
    regions = np.array(found, np.int32) if found else None
    kept = {FEATURES: [KeptInput(0, begin, image.n_positions)]}
    _run(runtime, prompt, 1, SamplingParams(temperature=1.0), kept=kept, regions=regions, rotary=rotary)


def _run(runtime: Runtime, prompt: Int32Array, decodes: int, sampling: SamplingParams, **first: Any) -> None:
    """Run a prefill and `decodes` decode steps. `first`: further fields of the prefill."""
    limits, n = runtime.limits, len(prompt)
    pages = np.arange(-(-(n + decodes) // limits.page_size), dtype=np.int32)
    windows = [np.minimum(pages + 1, pool.n_pages - 1) for pool in limits.windows]
    updates = PageUpdates(np.full_like(pages, 1), pages, pages + 1, windows)
    no_updates = replace(NO_UPDATES, windows=[NO_UPDATES.pages] * len(limits.windows))
    binding = RowBinding(1, sampling, 1, prompt, np.empty(0, np.int32))
    none, zero = _one(0)[:0], _one(0)
    going_on = StateUpdates(none, none, none, none, none, none)
    beginning = replace(going_on, begun=_one(1), sources=zero, starts=zero)
    for step in range(1 + decodes):
        start, length = (0, n) if step == 0 else (n + step - 1, 1)
        batch = StepBatch(
            kind="prefill" if step == 0 else "decode",
            rows=_one(1),
            starts=_one(start),
            lengths=_one(length),
            token_ids=prompt if step == 0 else _one(PENDING),
            outputs=_one(1),
            pending=_one(PENDING),
            bindings=[binding] if step == 0 else [],
            pages=updates if step == 0 else no_updates,
            states=(going_on if step else beginning) if limits.snapshots else None,
            **(first if step == 0 else {}),
        )
        runtime.launch_forward(step % 2, batch)
        output = runtime.launch_sampling(step % 2, batch, None).wait()
        vectors, logprobs = output.side_outputs.get(VECTORS), output.logprobs
        if vectors is not None and not np.isfinite(vectors).all():
            raise ModelError(f"{limits.model}: its vectors must be finite numbers, got {vectors.tolist()}")
        if logprobs is not None and not np.isfinite(logprobs).all():
            raise ModelError(f"{limits.model}: its logits must be finite numbers, got {logprobs.tolist()}")


def _one(value: int) -> Int32Array:
    return np.array([value], np.int32)
