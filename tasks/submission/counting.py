"""`count`: a task that a worker answers at once, beside its engine.

It has a queue of its own, because a full engine and a long queue must not delay it: `petiole.count` belongs to the
workers of `petiole`. It has no stream, and no place in a chain of generations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast, overload

from celery.exceptions import TimeoutError as GaveUp

from petiole.contract import types
from petiole.contract.requests.count import SUFFIX, CountDict, CountRequest, queue_of
from petiole.contract.requests.generation import in_json
from petiole.contract.requests.validation import validate
from petiole.tasks.app import worker_side
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.errors import GenerationFailed, InvalidRequest
from petiole.tasks.fleet import availability
from petiole.tasks.settings import warn_a_producer
from petiole.tasks.streams.readers import AsyncGeneration
from petiole.tasks.submission.options import choose_model
from petiole.tasks.submission.task import SubmittedTask
from petiole.tasks.wire.headers import check_submission

_NOT_OF_A_COUNT = {
    **dict.fromkeys(("eta", "countdown"), "a count is answered at once"),
    "registered": "a count has no stream",
}
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.25


class AsyncCount(AsyncGeneration):
    """Celery's `AsyncResult` of a count."""

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def get(
            self, timeout: float | None = None, propagate: Literal[True] = True, **options: Any
        ) -> CountDict: ...
        @overload
        def get(
            self, timeout: float | None = None, propagate: bool = True, **options: Any
        ) -> CountDict | Exception: ...
        def get(self, *args: Any, **options: Any) -> Any: ...

    async def aget(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
        """`get` for asyncio. It looks again and again, because a count has no stream, and mostly has its result at
        the second look."""
        give_up_at = float("inf") if timeout is None else time.monotonic() + timeout
        pause_s = SHORTEST_PAUSE_S
        while not await LOOKUPS.run(self.ready):
            if time.monotonic() + pause_s > give_up_at:
                raise GaveUp("The operation timed out.")
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
        return await LOOKUPS.run(self.get, None, propagate, **options)


class CountTask(SubmittedTask):
    """`count`."""

    abstract = True

    def apply_async(
        self,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        **options: Any,
    ) -> AsyncCount:
        """`Task.apply_async`; raises `InvalidRequest` at once for an invalid request."""
        if self.app.current_worker_task is None:
            warn_a_producer()
        kwargs = in_json(kwargs or {})
        for name, why in _NOT_OF_A_COUNT.items():
            if options.get(name):
                raise InvalidRequest(name, f"must not be given: {why}", options[name])
            options.pop(name, None)
        check_submission({**options, "task_id": more[0]} if more else options, self.app.conf.accept_content)
        request_of(args or (), kwargs)
        require_worker, confirm = options.pop("require_worker", False), options.pop("confirm", None)
        self._for_model({}, options)
        queue = str(options.pop("queue", None) or self.app.conf.task_default_queue)
        if require_worker:
            availability.require(queue)
        impatient = options.get("retry") is False
        options["queue"] = queue_of(queue)
        submitted = self._send(args, kwargs, more, options, confirm, impatient)
        if isinstance(submitted, AsyncGeneration):  # not an eager one
            submitted.__class__ = AsyncCount
            submitted.submitted_to = queue
        return cast(AsyncCount, submitted)

    def _for_model(self, request: Mapping[str, Any], options: dict[str, Any]) -> Mapping[str, Any]:
        """A count has no adapter."""
        choose_model(self.app, {}, options)
        return request

    def headers_of(self, args: Sequence[object], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
        request_of(args, kwargs)
        return {}

    def result_of(self, task_id: str, queue: str) -> AsyncGeneration:
        result = super().result_of(task_id, queue.removesuffix(SUFFIX))
        result.__class__ = AsyncCount
        return result

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.CountCall]) -> AsyncCount: ...  # type: ignore[override]
        async def adelay(self, **options: Unpack[types.CountCall]) -> AsyncCount: ...  # type: ignore[override]

    def counted(self, given: Sequence[object], options: Mapping[str, Any]) -> CountDict:
        """The running task's result."""
        if self.request.called_directly:
            raise GenerationFailed(f"{self.name} runs in a worker: submit it with delay or apply_async")
        found: CountDict = worker_side.load(worker_side.COUNT)(request_of(given, options))
        return found


def request_of(given: Sequence[object], options: Mapping[str, Any]) -> CountRequest:
    """The request in a message's arguments. Raises `InvalidRequest`."""
    if given:
        raise InvalidRequest("args", "must be empty: this task's options are named", f"{len(given)} of them")
    texts = options.get("texts")
    return validate(CountRequest, {**options, "texts": [texts]} if isinstance(texts, str) else options)
