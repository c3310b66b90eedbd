"""A request's body as JSON. What is not JSON, too large or too deep is refused by name before anything else is
done with it.

A body may be large, and the gateway rarely looks for cycles of references. So no frame keeps an error that it
raises: the error knows the frame, and with it the body."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from petiole.gateway.core import caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.sse import ClientGone
from petiole.tasks.errors import InvalidRequest, shorten
from petiole.tasks.settings import settings

M = TypeVar("M", bound=BaseModel)


async def read(request: Request, kind: type[M]) -> M:
    """The body as a request of this kind. Raises `Failure`."""
    body = await _bytes(request)
    if (made := caller.request()) is not None:
        made.has(body)
    return as_request(decoded(body), kind)


async def _bytes(request: Request) -> bytes:
    most = settings().gateway_max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(parts)


def _too_large(most: int) -> Failure:
    return Failure(413, f"the body must have at most {most} bytes", code="request_too_large")


def decoded(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
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
        refused = _refused(error)
    try:
        raise refused
    finally:
        del refused


def _refused(error: ValidationError) -> Failure:
    details = error.errors(include_url=False)
    first = min(details, key=lambda detail: detail["type"] != "extra_forbidden")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return invalid(cause.field, str(cause), "invalid_value")
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    match first["type"]:
        case "extra_forbidden":
            return invalid(field, f"{field}: is not a parameter of this endpoint", "unknown_parameter")
        case "missing":
            return invalid(field, f"{field}: is required", "missing_required_parameter")
        case _:
            limit = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
            return invalid(field, f"{field}: {limit}, got {shorten(first['input'])}", "invalid_type")
