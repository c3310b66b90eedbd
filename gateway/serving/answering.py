"""How a request is answered, now and later, whatever the interface.

An interface gives an `AnswerKind` its view, its whole answer, and how it writes an error. All else is here."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from petiole.gateway.core.events import encode
from petiole.gateway.core.failures import Failure, failure_of, invalid
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream, View, cursor_of
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.serving import generations, image_urls, records
from petiole.gateway.serving.generations import Generation
from petiole.gateway.serving.sse import EventStream, events, unless_gone
from petiole.tasks.app.thread_executor import ProcessThreads
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings

LARGE_PROMPTS = 1000
"""Tokens of prompts with log-probabilities, above which an answer is large."""

_LARGE = ProcessThreads("answers", size=2, most=100_000)


@dataclass(frozen=True)
class AnswerKind:
    """How requests of one kind are answered, now and later."""

    name: str
    prefix: str
    view: Callable[[RequestRecord], View]
    whole: Callable[[RequestRecord, Sequence[CollectedOutput]], dict[str, Any]]
    failed: Callable[[Failure], bytes]
    """How an error looks in a stream that has begun."""
    end: bytes = b""
    """What every stream ends with."""

    def events(self, generation: Generation, after: Sequence[int] = ()) -> AsyncGenerator[bytes, None]:
        record = generation.record
        return events(generation, ClientStream(self.view(record), record, after), self.failed, self.end)

    async def answer(self, generation: Generation) -> Response:
        try:
            outputs = await generation.whole()
            build = partial(self.whole, generation.record, outputs)
            if sum(len(one.prompt) for one in outputs) > LARGE_PROMPTS:
                return await large_answer(build)
            return json_answer(build())
        finally:
            await generation.aclose()

    async def create(self, request: Request, plan: Plan, stream: bool) -> Response:
        return await unless_gone(request, self._begun(plan, stream))

    async def _begun(self, plan: Plan, stream: bool) -> Response:
        generation = await generations.begin(plan)
        if not stream:
            return await self.answer(generation)
        await accepted(generation)
        return EventStream(self.events(generation))

    async def get(self, request: Request) -> Response:
        """The answer of an earlier request: whole, when it has ended, or its events after a number."""
        record = await records.get(request.path_params["id"], self.name)
        if not flag(request, "stream"):
            return await unless_gone(request, self.answer(generations.again(record)))
        after = after_of(request, record)
        return EventStream(self.events(generations.again(record), after))

    async def delete(self, request: Request) -> Response:
        """Cancel it, if it is not finished, and forget it."""
        record = await records.get(request.path_params["id"], self.name)
        await generations.cancel(record)
        await records.forget(record.id)
        return json_answer({"id": record.id, "object": f"{self.name}.deleted", "deleted": True})

    def routes(self, path: str, create: Callable[[Request], Any]) -> list[Route]:
        return [
            Route(path, create, methods=["POST"]),
            Route(f"{path}/{{id}}", self.get, methods=["GET"]),
            Route(f"{path}/{{id}}", self.delete, methods=["DELETE"]),
        ]


def new_id(prefix: str) -> str:
    """Nobody guesses it: whoever has it may read the answer."""
    return f"{prefix}{secrets.token_hex(16)}"


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


async def large_answer(build: Callable[[], Mapping[str, object]]) -> Response:
    """An answer that takes long to build and to encode. A thread does both, and others are served meanwhile."""
    return Response(await _LARGE.run(lambda: piecewise(build())), media_type="application/json")


def piecewise(answer: Mapping[str, object]) -> bytes:
    """As JSON. The entries of an iterator are made and encoded one by one: one call of the encoder for all of them
    would not let other threads run."""
    pieces, before = list[bytes](), b"{"
    for name, value in answer.items():
        entries = b"[%b]" % b",".join(map(encode, value)) if isinstance(value, Iterator) else encode(value)
        pieces += [before, encode(name), b":", entries]
        before = b","
    return b"".join([*pieces, b"}"]) if pieces else b"{}"


def checked(plan: Callable[[], Any], names: Mapping[str, str] | None = None) -> Any:
    """The plan. Raises `Failure` in place of `InvalidRequest`. `names`: by an option of a task, the client's
    field."""
    try:
        return plan()
    except InvalidRequest as error:
        raise failure_of(error, names) from None


async def fetched(urls: list[tuple[str, str]]) -> dict[str, str]:
    """By URL, the data URL of its image. Raises `Failure`."""
    try:
        return await image_urls.fetched(urls) if urls else {}
    except InvalidRequest as error:
        raise failure_of(error) from None


async def accepted(generation: Generation) -> None:
    """A stream begins when a worker has accepted its request, or after a time: then a refusal is an event."""
    try:
        await generation.accepted(settings().gateway_prepared_s)
    except BaseException:
        await generation.aclose()
        raise


def flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise invalid(name, f"{name}: must be true or false, got {given[:64]!r}", "invalid_value")
    return given == "true"


def after_of(request: Request, record: RequestRecord) -> list[int]:
    """The number after which a client wants events: `starting_after`, or what an SSE client sends by itself."""
    given = request.query_params.get("starting_after") or request.headers.get("last-event-id") or ""
    return cursor_of(given, len(record.tasks)) if given else []
