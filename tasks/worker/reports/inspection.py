"""Commands about a model, by the engine of this process: what it needs, what it can, a timeline of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.runtime import sizing
from petiole.gpu_worker.runtime.device.tracing import Tracer
from petiole.gpu_worker.runtime.sizing import Served, Sizes, sizes_of
from petiole.tasks.settings import settings


def plan(
    given: Mapping[str, object],
    memory: int | None,
    length: int | None,
    capability: tuple[int, int] | None = None,
) -> Sizes:
    """What a worker with these settings needs, and what this memory serves. given: settings of the engine in place
    of the configured ones. See `sizes_of`."""
    return sizes_of(EngineConfig(**{**settings().engine_options(), **given}), memory, length, capability)


def served(model: str) -> Served:
    """How this model would be served. See `sizing.served`."""
    return sizing.served(model, settings().engine_options().get("revision"))


def trace(path: str, requests: int = 8, tokens: int = 64) -> None:
    """Run the configured model briefly, and write a timeline of host and device in each step to `path`."""
    tracer = Tracer()
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    with Engine(EngineConfig(**settings().engine_options()), tracer=tracer) as engine:
        engine.generate([Request(prompt=f"Count to {n}.", sampling=sampling) for n in range(10, 10 + requests)])
    tracer.save(path)
