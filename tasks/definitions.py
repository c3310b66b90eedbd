"""The two tasks: `generate` continues a prompt, `chat` answers a conversation.

Their bodies do not generate. The worker's pool parses a task's arguments with `parse` and submits the request to
the engine. When the result is ready, it runs Celery's own trace function, and the body returns that result. So
states, links, chords, retries and events are Celery's code, and many tasks share one model.
"""
# `GenerateTask` and `ChatTask` take fewer options than their base:
# mypy: disable-error-code="override"

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from celery import Task
from celery.canvas import Signature
from kombu.exceptions import OperationalError

from tasks import affinity, sentinels, streaming
from tasks.app import app
from tasks.errors import GenerationFailed, InvalidRequest, Unavailable
from tasks.schemas import SENT, ChatRequest, GenerateRequest, StreamDelta, validate
from tasks.settings import redacted
from tasks.types import (
    AsyncGeneration,
    ChatOptions,
    GenerateOptions,
    PartialChatOptions,
    PartialGenerateOptions,
)

GENERATE, CHAT = "tasks.generate", "tasks.chat"
SCHEMAS: dict[str, type[GenerateRequest] | type[ChatRequest]] = {GENERATE: GenerateRequest, CHAT: ChatRequest}

Submission = Mapping[str, Any]
T = TypeVar("T", bound="GenerationTask")


class GenerationTask(Task):  # type: ignore[misc]
    """A task whose output can be streamed.

    Its message is acknowledged after its result is stored, whatever the application's settings for other tasks:
    a worker that shuts down can hand it back to the queue.
    """

    abstract = True
    acks_late = reject_on_worker_lost = acks_on_failure = acks_on_timeout = True
    resultrepr_maxsize = 256  # characters of a result in events, which Celery formats even if events are off
    throws = (InvalidRequest,)  # the caller's mistake: a worker logs one line at INFO, and no traceback

    def apply_async(
        self,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        **options: Any,
    ) -> AsyncGeneration:
        """`Task.apply_async`; raises `InvalidRequest` at once for an invalid request.

        The next link of a chain and the body of a chord, which a worker submits, are validated by the worker that
        receives them: their errors must not fail the task before them.
        """
        sent_on = "parent_id" in options or isinstance(self.app.current_worker_task, GenerationTask)
        options["headers"] = {**(options.get("headers") or {}), SENT: round(time.time(), 3)}
        try:
            ours = affinity.headers(parse(self.name, args or (), kwargs or {}))
            options["headers"] = {**ours, **options["headers"]}
        except InvalidRequest:
            if not sent_on:
                raise
        try:
            submitted: AsyncGeneration = super().apply_async(args, kwargs, *more, **options)
            return submitted
        except OperationalError as error:
            url = str(self.app.conf.broker_url)
            reason = sentinels.why(error, url, self.app.conf.broker_transport_options)
            raise Unavailable(redacted(url), reason) from None

    def stream(
        self, *, timeout_s: float | None = None, submission: Submission | None = None, **options: Any
    ) -> streaming.Stream:
        """Submit the task and iterate over its deltas.

        Invalid options raise `InvalidRequest` at once. `submission` holds arguments of `apply_async`, such as
        `{"priority": 3}`; `timeout_s` limits the wait for each delta.
        """
        result = self.apply_async(kwargs=options, **(submission or {}))
        reader = streaming.Stream(result, timeout_s, bool(options.get("cancel_on_disconnect")), self.app)
        reader.open()  # subscribe while the engine works
        return reader

    async def astream(
        self, *, timeout_s: float | None = None, submission: Submission | None = None, **options: Any
    ) -> AsyncGenerator[StreamDelta, None]:
        """`stream` for asyncio. The task is submitted in a thread, because that may block on the broker."""
        result = await asyncio.to_thread(self.apply_async, kwargs=options, **(submission or {}))
        deltas = streaming.AsyncStream(result, timeout_s, bool(options.get("cancel_on_disconnect")), self.app)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    if TYPE_CHECKING:

        def AsyncResult(self, task_id: str, **options: Any) -> AsyncGeneration: ...  # noqa: N802 - Celery's name

    def finished(self, given: Sequence[object], options: Mapping[str, Any]) -> dict[str, Any]:
        """The running task's result from the pool; if eager, generate it here."""
        if self.request.called_directly:
            raise GenerationFailed(f"{self.name} runs in a worker: submit it with delay, apply_async or stream")
        if self.request.is_eager:
            from tasks.worker import local

            result: dict[str, Any] = local.run(parse(self.name, given, options), self.request.id)
            return result
        from tasks.worker.results import take_result

        return take_result(self.request.id)


class GenerateTask(GenerationTask):
    """`generate`: what it takes, for type checkers."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[GenerateOptions]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[PartialGenerateOptions]) -> Signature: ...
        def si(self, **options: Unpack[GenerateOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: GenerateOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            submission: Submission | None = None,
            **options: Unpack[GenerateOptions],
        ) -> streaming.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            submission: Submission | None = None,
            **options: Unpack[GenerateOptions],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class ChatTask(GenerationTask):
    """`chat`: what it takes, for type checkers."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[ChatOptions]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[PartialChatOptions]) -> Signature: ...
        def si(self, **options: Unpack[ChatOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: ChatOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            submission: Submission | None = None,
            **options: Unpack[ChatOptions],
        ) -> streaming.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            submission: Submission | None = None,
            **options: Unpack[ChatOptions],
        ) -> AsyncGenerator[StreamDelta, None]: ...


def _task(name: str, base: type[T]) -> Callable[[Callable[..., dict[str, Any]]], T]:
    """`app.task`, with the type of what it makes."""
    decorator: Callable[[Callable[..., dict[str, Any]]], T] = app.task(base=base, bind=True, name=name)
    return decorator


@_task(GENERATE, GenerateTask)
def generate(self: GenerationTask, *given: object, **options: Any) -> dict[str, Any]:
    """Continue `prompt`, text or token ids. The options are the fields of `tasks.schemas.GenerateRequest`.

    In a chain the text of the previous result is appended to `prompt`, which may be omitted; in the body of a
    chord the texts of all results are appended, one a line.
    """
    return self.finished(given, options)


@_task(CHAT, ChatTask)
def chat(self: GenerationTask, *given: object, **options: Any) -> dict[str, Any]:
    """Answer `messages`. The options are the fields of `tasks.schemas.ChatRequest`.

    In a chain the text of the previous result is appended as a user message.
    """
    return self.finished(given, options)


def parse(name: str, given: Sequence[object], options: Mapping[str, Any]) -> GenerateRequest | ChatRequest:
    """The request in a message's arguments. Raises `InvalidRequest`."""
    options = dict(options)
    if given:
        if len(given) > 1:
            raise InvalidRequest(
                "args", "must be empty, or the result of the task before", f"{len(given)} of them"
            )
        if SCHEMAS[name] is ChatRequest:
            messages = options.get("messages", [])
            if not isinstance(messages, list):
                raise InvalidRequest("messages", "must be a list", messages)
            options["messages"] = [*messages, {"role": "user", "content": text_of(given[0])}]
        else:
            prompt = options.get("prompt", "")
            if not isinstance(prompt, str):
                raise InvalidRequest("prompt", "must be text where a result is put behind it", prompt)
            options["prompt"] = prompt + text_of(given[0])
    return validate(SCHEMAS[name], options)


def text_of(result: object) -> str:
    """The text of a previous task's result: text, a generation's result, or a list of either."""
    match result:
        case str():
            return result
        case {"text": str(text)}:
            return text
        case list():
            return "\n".join(map(text_of, result))
    raise InvalidRequest("args[0]", "must be text, a generation's result, or a list of these", result)
