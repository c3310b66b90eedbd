"""What engines share: requests go in, each ends once, and one thread owns those that are accepted.

    submit --> preparation pool --inbox--> engine thread --emissions--> text thread --> handles, callbacks

`Engine` computes on a device; `petiole.engines` has one for whose sequences another program computes. Each has a
loop of its own, and all else from here."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from petiole.contract.results.outputs import Prepared
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine.open_requests import L, OpenRequests
from petiole.gpu_worker.engine.statistics import facts_of
from petiole.gpu_worker.exceptions import EngineClosed, HandedBack
from petiole.gpu_worker.request import Delta, FinishReason, Request, Result
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.stopping import Finish
from petiole.gpu_worker.text import Tokenizer

T = TypeVar("T")


class Serving(ABC, Generic[L]):
    """An engine's requests and threads. Thread-safe."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    _tell: Callable[[BaseException], None] | None
    _fatal: BaseException | None

    def serve(self, requests: OpenRequests[L]) -> None:
        """Make the threads that these requests pass; `_begin` starts them."""
        self._telling, self._fatal = threading.Lock(), None
        self.on_fatal = None
        self._requests = requests
        self._intake, self._loop, self._text = requests.intake, requests.loop, requests.text
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)

    @property
    @abstractmethod
    def limits(self) -> ModelLimits: ...

    @property
    def on_fatal(self) -> Callable[[BaseException], None] | None:
        """Called once, on the engine thread, after a failure of what computes, when every request has received its
        error. It is called at once if it is set after that."""
        return self._tell

    @on_fatal.setter
    def on_fatal(self, tell: Callable[[BaseException], None] | None) -> None:
        with self._telling:
            self._tell, error = tell, self._fatal
        if tell is not None and error is not None:
            tell(error)

    def start(self) -> Self:
        """Start the threads. Returns once the engine can serve requests."""
        self._text.start()
        self._thread.start()
        self._requests.closed = False
        return self

    def _close(self) -> None:
        """The threads have stopped: release what computes."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown(drain=error is None)

    def shutdown(self, drain: bool = True) -> None:
        """Stop accepting requests, end the open ones and stop the threads. Returns when all have stopped.

        `drain` runs open requests to completion. Otherwise they are cancelled. A second call does nothing.
        """
        if (texts := self._requests.close()) is None:
            return
        end = Finish(FinishReason.CANCELLED)
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
        self._close()

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

    def _on_fatal(self, error: BaseException) -> None:
        with self._telling:
            self._fatal, tell = error, self._tell
        if tell is not None:
            tell(error)

    # ------------------------------------------------------------ from handles

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None:
        """See `Handle.cancel`."""
        self._requests.end_later(handle, Finish(reason))

    def hand_back_request(self, handle: Handle) -> None:
        """See `Handle.hand_back`."""
        self._requests.end_later(handle, HandedBack(f"request {handle.request.request_id} was handed back"))

    # ------------------------------------------------------------ control

    def resume(self) -> None:
        self._call(self._loop.unpause)

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

    def entries_of(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it, empty where it has none, as for IMAGE. Runs on the calling
        thread. Raises InvalidRequest."""
        return self._intake.preparer.entries_of(token_ids)

    def text_lengths(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """For each of these tokens, of an output of this request: how many characters the text up to it has. Runs
        on the calling thread. Raises InvalidRequest."""
        return self._intake.preparer.text_lengths(request, token_ids)

    def facts(self) -> dict[str, Any]:
        """What the model is and takes, as far as its checkpoint says so."""
        return facts_of(self.limits, self.tokenizer, self.config)

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
