"""The two tasks: `generate` continues a prompt, `chat` answers a conversation.

Their bodies do not generate. The worker's pool reads a task's arguments through `parse`, lets the engine work,
and only when the result is there runs Celery's own trace around the body, which hands the result over. So
states, links, chords, retries and events are Celery's code, and many tasks share one model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from celery import Task
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from tasks import sentinels, streaming
from tasks.app import app
from tasks.errors import InvalidRequest, Unavailable
from tasks.schemas import ChatRequest, GenerateRequest, StreamDelta, validate
from tasks.settings import redacted

GENERATE, CHAT = "tasks.generate", "tasks.chat"
SCHEMAS: dict[str, type[GenerateRequest] | type[ChatRequest]] = {GENERATE: GenerateRequest, CHAT: ChatRequest}

Submission = Mapping[str, Any]


class GenerationTask(Task):  # type: ignore[misc]
    """A task whose output can be read while it is made.

    Its message is kept until its result is stored, whatever the application says of its own tasks: a worker that
    ends hands it on.
    """

    abstract = True
    acks_late = reject_on_worker_lost = acks_on_failure_or_timeout = True
    resultrepr_maxsize = 256  # letters of a result in an event: Celery writes them for every task, heard or not
    throws = (InvalidRequest,)  # the caller's mistake: a worker logs one line at INFO, and no traceback

    def apply_async(
        self,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        **options: Any,
    ) -> AsyncResult:
        """Celery's own; what is wrong with the request raises `InvalidRequest` here and now.

        But the next link of a chain and the body of a chord, which a worker sends on, are left to the worker that
        gets them: what is wrong with them is not the failure of the task before.
        """
        sent_on = "parent_id" in options or isinstance(self.app.current_worker_task, GenerationTask)
        if not sent_on:
            parse(self.name, args or (), kwargs or {})
        try:
            return super().apply_async(args, kwargs, *more, **options)
        except OperationalError as error:
            url = str(self.app.conf.broker_url)
            reason = sentinels.why(error, url, self.app.conf.broker_transport_options)
            raise Unavailable(redacted(url), reason) from None

    def stream(
        self, *, timeout_s: float | None = None, submission: Submission | None = None, **options: Any
    ) -> streaming.Stream:
        """Submit the task and read its deltas as they come.

        Bad options raise `InvalidRequest` here and now. `submission` are arguments of `apply_async`, such as
        `{"priority": 3}`; `timeout_s` is how long to wait for each delta.
        """
        result = self.apply_async(kwargs=options, **(submission or {}))
        reader = streaming.Stream(result, timeout_s, bool(options.get("cancel_on_disconnect")), self.app)
        reader.open()  # while the engine works
        return reader

    async def astream(
        self, *, timeout_s: float | None = None, submission: Submission | None = None, **options: Any
    ) -> AsyncIterator[StreamDelta]:
        """`stream` for asyncio. The submission itself runs in a thread: it may wait for the broker."""
        result = await asyncio.to_thread(self.apply_async, kwargs=options, **(submission or {}))
        deltas = streaming.AsyncStream(result, timeout_s, bool(options.get("cancel_on_disconnect")), self.app)
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    def finished(self, given: Sequence[object], options: Mapping[str, Any]) -> dict[str, Any]:
        """The result that the pool has put in place for the task that runs now."""
        if self.request.is_eager:
            from tasks.worker import local

            result: dict[str, Any] = local.run(parse(self.name, given, options), self.request.id)
            return result
        from tasks.worker.results import take_result

        return take_result(self.request.id)


@app.task(base=GenerationTask, bind=True, name=GENERATE)  # type: ignore[untyped-decorator]
def generate(self: GenerationTask, *given: object, **options: Any) -> dict[str, Any]:
    """Continue `prompt`, text or token ids. The options are the fields of `tasks.schemas.GenerateRequest`.

    In a chain the text of the previous result follows the prompt, if there is one; in the body of a chord the
    texts of all results do, one a line.
    """
    return self.finished(given, options)


@app.task(base=GenerationTask, bind=True, name=CHAT)  # type: ignore[untyped-decorator]
def chat(self: GenerationTask, *given: object, **options: Any) -> dict[str, Any]:
    """Answer `messages`. The options are the fields of `tasks.schemas.ChatRequest`.

    In a chain the text of the previous result is one more message of the user's.
    """
    return self.finished(given, options)


def parse(name: str, given: Sequence[object], options: Mapping[str, Any]) -> GenerateRequest | ChatRequest:
    """The request that a message's arguments stand for, or `InvalidRequest`."""
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
    """The text of what a chain passes on: text, a generation's result, or a list of either."""
    match result:
        case str():
            return result
        case {"text": str(text)}:
            return text
        case list():
            return "\n".join(map(text_of, result))
    raise InvalidRequest("args[0]", "must be text, a generation's result, or a list of these", result)
