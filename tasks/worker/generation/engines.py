"""Creates the engine that a worker runs.

`PETIOLE_ENGINE` names it, or `PETIOLE_ENGINE_FACTORY` its factory as "module:callable". The factory is called with
an `EngineConfig` and returns an `EngineLike`. The fleet's tests use an engine that generates fake tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from petiole import gpu_worker
from petiole.contract.results.outputs import Prepared
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import Delta, Request
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.tasks.app.worker_side import PackagesMissingError
from petiole.tasks.settings import Settings

_ENGINES = {"petiole": "petiole.gpu_worker.engine:Engine", "vllm": "petiole.engines.vllm:VllmEngine"}


class EngineLike(Protocol):
    """The part of `gpu_worker.Engine` that the pool uses. `config`: once started, its numbers are decided."""

    config: EngineConfig
    limits: ModelLimits
    on_fatal: Callable[[BaseException], None] | None

    @property
    def healthy(self) -> bool: ...

    def start(self) -> object: ...

    def submit(
        self,
        request: Request,
        *,
        on_prepared: Callable[[Handle, Prepared], None] | None = None,
        on_delta: Callable[[Handle, Delta], None] | None = None,
        on_admitted: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle], None] | None = None,
    ) -> Handle: ...

    def stats(self) -> dict[str, float | int | str]: ...

    def expert_tokens(self) -> Sequence[Sequence[int]]: ...

    def tokens_of(self, request: Request) -> list[int]: ...

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def entries_of(self, token_ids: Sequence[int]) -> list[str]: ...

    def text_lengths(self, request: Request, token_ids: Sequence[int]) -> list[int]: ...

    def facts(self) -> dict[str, Any]: ...

    def heartbeat_age_s(self) -> float: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def prepare_reload(self, model: str) -> Callable[[], None]: ...

    def shutdown(self, drain: bool = True) -> None: ...


def make_engine(settings: Settings) -> EngineLike:
    """Load, warm up and start the engine of the settings. Raises InvalidRequest, and PackagesMissingError without
    torch: an engine may compute elsewhere."""
    module, _, name = (settings.engine_factory or _ENGINES[settings.engine]).partition(":")
    try:
        factory = getattr(import_module(_in_full(module)), name, None) if name else None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PackagesMissingError(["torch"]) from None
    if not callable(factory):
        raise InvalidRequest("engine_factory", "must be module:callable", settings.engine_factory)
    engine: EngineLike = factory(EngineConfig(**settings.engine_options()))
    engine.start()
    return engine


def _in_full(module: str) -> str:
    """The full name of a module. `gpu_worker.engine` always means Petiole's, because settings of checkouts name it
    so."""
    if module.partition(".")[0] == gpu_worker.__name__.rpartition(".")[2]:
        with suppress(ModuleNotFoundError):
            if find_spec(f"petiole.{module}"):
                return f"petiole.{module}"
    return module


def load_engine(settings: Settings) -> Future[EngineLike]:
    """`make_engine` on a background thread, so that the calling thread handles signals while native code loads."""
    engine: Future[EngineLike] = Future()

    def load() -> None:
        try:
            engine.set_result(make_engine(settings))
        except BaseException as error:
            engine.set_exception(error)

    threading.Thread(target=load, name="petiole-load", daemon=True).start()
    return engine
