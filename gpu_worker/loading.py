"""What an engine loads when it is given nothing: the model that the configuration names."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from gpu_worker.config import EngineConfig
from gpu_worker.constraints import compile_constraint
from gpu_worker.preparation import ConstraintCompiler
from gpu_worker.runtime.device import open_device
from gpu_worker.runtime.interface import Runtime
from gpu_worker.text import Tokenizer, load_tokenizer
from gpu_worker.tracing import Tracer


class Parts(NamedTuple):
    runtime: Runtime
    tokenizer: Tokenizer | None
    compile_constraint: ConstraintCompiler | None


def load_runtime(config: EngineConfig, tracer: Tracer) -> Runtime:
    """The model and the memory behind it, on the configured device. Raises ModelError."""
    from gpu_worker.runtime.runtime import ModelRuntime

    device = open_device(config.device)
    if tracer.enabled:
        device.on_span = tracer.record_device
    return ModelRuntime(config, device=device)


def load_text(config: EngineConfig) -> tuple[Tokenizer, ConstraintCompiler]:
    """The model's tokenizer, and what compiles constraints against it."""
    from gpu_worker.models.loading import resolve_model

    tokenizer = load_tokenizer(resolve_model(config.model, config.revision))
    return tokenizer, partial(compile_constraint, tokenizer=tokenizer)


def load_parts(
    config: EngineConfig, runtime: Runtime | None, tokenizer: Tokenizer | None, tracer: Tracer
) -> Parts:
    """Fill in what was not given. A given runtime without a tokenizer serves token ids only."""
    if runtime is not None and tokenizer is None:
        return Parts(runtime, None, None)
    if tokenizer is not None:
        compiler: ConstraintCompiler = partial(compile_constraint, tokenizer=tokenizer)
    else:
        tokenizer, compiler = load_text(config)
    return Parts(runtime or load_runtime(config, tracer), tokenizer, compiler)
