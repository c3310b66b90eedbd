"""A request's body as JSON. What is not JSON, too large or too deep is refused by name before anything else is
done with it. A large one is read on a thread: others are served meanwhile.

A body may be large, and the gateway rarely looks for cycles of references. So no frame keeps an error that it
raises: the error knows the frame, and with it the body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from petiole import json_text, memory
from petiole.contract.errors import shorten
from petiole.contract.requests.bounds import MOST_VALUES, Bounded, too_many_in
from petiole.contract.requests.validation import limit_of
from petiole.gateway.core import caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.core.foreign import unknown
from petiole.gateway.core.requests import RequestBody
from petiole.gateway.serving.sse import ClientGone
from petiole.tasks.app.thread_executor import ProcessThreads
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings

M = TypeVar("M", bound=Bounded)
V = TypeVar("V")
B = TypeVar("B", bound=bytes | bytearray | str)

_CODINGS = frozenset({"gzip", "x-gzip", "deflate", "br", "zstd", "compress", "x-compress"})
"""Few bytes could become a thousand times as many."""
_LARGE = ProcessThreads("bodies", size=1, most=100_000)


async def read(request: Request, kind: type[M]) -> M:
    """The body as a request of this kind. Raises `Failure`."""
    body = await _bytes(request)
    asked = await apart(lambda body: _request(body, kind), body)
    if isinstance(asked, RequestBody) and asked.ignored:
        caller.tell(unknown.HEADER, unknown.told(asked.ignored))
    return asked


async def looked_at(request: Request) -> tuple[dict[str, Any], Request]:
    """The object in the body, and the request again, for a handler that reads it. Raises `Failure`."""
    body = await _bytes(request)
    value = await apart(decoded, body)
    unread: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return value, Request(request.scope, receive)


async def apart(read: Callable[[B], V], body: B) -> V:
    """What `read` makes of a body, in the caller's context. A large body is read on a thread."""
    if len(body) < memory.LARGE_BYTES:
        return read(body)
    return await _LARGE.run(_released, read, body)


def _released(read: Callable[[B], V], body: B) -> V:
    try:
        return read(body)
    finally:
        memory.release()


def _request(body: bytes | bytearray, kind: type[M]) -> M:
    value = decoded(body)
    if (made := caller.request()) is not None:
        made.has(body)
    return as_request(value, kind)


async def _bytes(request: Request) -> bytearray:
    coding = request.headers.get("content-encoding", "").lower()
    if not _CODINGS.isdisjoint(part.strip() for part in coding.split(",")):
        raise Failure(
            415, f"content-encoding: must be identity, got {coding}", code="unsupported_content_encoding"
        )
    most = settings().gateway_max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared) > most:
        raise _too_large(f"{most} bytes")
    body = bytearray()  # joined parts would take twice the memory
    try:
        async for part in request.stream():
            if len(body) + len(part) > most:
                raise _too_large(f"{most} bytes")
            body += part
    except ClientDisconnect:
        raise ClientGone from None
    return body


def _too_large(most: str) -> Failure:
    return Failure(413, f"the body must have at most {most}", code="request_too_large")


def decoded(body: bytes | bytearray) -> dict[str, Any]:
    """The object in a body. Raises `Failure`."""
    if values := too_many_in(body):
        raise _too_large(f"{MOST_VALUES} lists, objects, commas and colons, got {values}")
    try:
        value = json_text.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "is nested too deeply" if isinstance(error, RecursionError) else "is not JSON in UTF-8"
        raise invalid(None, f"the body {what}", "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(None, f"the body must be a JSON object, got {shorten(value)}", "invalid_json")
    return value


def as_request(value: dict[str, Any], kind: type[M]) -> M:
    """Raises `Failure` for its first error; unknown fields are reported first."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        refused = _refused(error, kind)
    try:
        raise refused
    finally:
        del refused


def _refused(error: ValidationError, kind: type[Bounded]) -> Failure:
    details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return invalid(cause.field, str(cause), "invalid_value")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    match first["type"]:
        case "extra_forbidden":
            hint = unknown.hint(field, kind.model_fields)
            told = f"{field}: is not a parameter of this endpoint{hint and f': {hint}'}"
            return invalid(field, told, "unknown_parameter")
        case "missing":
            return invalid(field, f"{field}: is required", "missing_required_parameter")
        case _:
            told = f"{field}: {limit_of(first)}, got {shorten(first['input'])}"
            return invalid(field, told, "invalid_type")
