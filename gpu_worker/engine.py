"""The engine: one thread that owns the device, and the loop that keeps it busy.

with Engine(EngineConfig(model="petiole-tiny", device="cpu")) as engine:
    handle = engine.submit(Request(prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=8, temperature=0)))
    for delta in handle: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from gpu_worker.config import EngineConfig
from gpu_worker.handle import Handle
from gpu_worker.request import Delta, FinishReason, Request, Result
from gpu_worker.runtime.interface import ModelLimits, Runtime

if TYPE_CHECKING:
    from gpu_worker.text import Tokenizer  # type: ignore[attr-defined]


class Engine:
    """Serves requests from one model on one device. Thread-safe.

    `runtime` and `tokenizer` may be given (tests do); otherwise the model that `config` names is loaded.
    """

    limits: ModelLimits
    on_fatal: Callable[[BaseException], None] | None
    failure: BaseException | None

    def __init__(
        self, config: EngineConfig, *, runtime: Runtime | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.config = config
        self.on_fatal = None
        self.failure = None

    def start(self) -> Engine:
        """Load the model, warm it up and start the threads. Returns when requests can be served."""
        return self

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown(drain=error is None)

    def submit(
        self,
        request: Request,
        *,
        on_delta: Callable[[Handle, Delta], None] | None = None,
        on_admitted: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle], None] | None = None,
    ) -> Handle:
        """Never blocks, never raises for bad input: an `InvalidRequest` becomes the handle's error.

        The callbacks run on the text thread, in order, `on_done` last and exactly once; they must be quick.
        """
        return Handle(request, self, on_delta=on_delta, on_admitted=on_admitted, on_done=on_done)

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Submit all, wait for all, in order. Raises the first error."""
        return [handle.result() for handle in [self.submit(request) for request in requests]]

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None:
        """See `Handle.cancel`."""

    def hand_back_request(self, handle: Handle) -> None:
        """See `Handle.hand_back`."""

    @property
    def healthy(self) -> bool:
        return self.failure is None

    def stats(self) -> dict[str, float | int | str]:
        return {}

    def heartbeat_age_s(self) -> float:
        """Seconds since the loop last went round; 0 while it sleeps because there is nothing to do."""
        return 0.0

    def pause(self) -> None:
        """Drain the pipeline and hold; submissions wait. Returns when the device is idle."""

    def resume(self) -> None: ...

    def reload(self, model: str) -> None:
        """Replace the weights: drain, flush the prefix cache, requeue what runs, load, go on."""

    def shutdown(self, drain: bool = True, handback: bool = False) -> None:
        """`drain`: finish what was accepted. `handback`: end it with HandedBack. Neither: cancel it."""

    def check_invariants(self) -> None:
        """Run the conservation and pipeline checks on the engine thread; raises AssertionError."""
