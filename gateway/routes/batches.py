"""The handlers of /files and /batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from petiole.gateway.batches import files, jobs
from petiole.gateway.batches.file_storage import place
from petiole.gateway.batches.jobs import CreateBatch
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.openai.answers import listed
from petiole.gateway.serving import request_body
from petiole.gateway.serving.answering import json_answer
from petiole.gateway.serving.sse import ClientGone
from petiole.tasks.settings import settings

MOST_FIELDS = 16
_AROUND = 64 * 1024
"""Bytes of a form beside its file."""


async def upload(request: Request) -> Response:
    await place().root()
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        raise invalid(None, f"the body must be multipart/form-data, got {kind[:64]!r}", "invalid_type")
    try:
        form = await MultiPartParser(
            request.headers, _limited(request), max_files=1, max_fields=MOST_FIELDS
        ).parse()
    except (MultiPartException, LookupError, UnicodeError) as error:
        raise invalid(None, f"the body must be a form ({error})", "invalid_form") from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        content = form.get("file")
        if not isinstance(content, UploadFile):
            raise invalid("file", "file: is required, with a name", "missing_required_parameter")
        purpose, ends = files.of_form({name: value for name, value in form.items() if isinstance(value, str)})
        return json_answer((await files.create(content.file, content.filename or "file", purpose, ends)).shown())
    finally:
        await form.close()


async def _limited(request: Request) -> AsyncGenerator[bytes, None]:
    """The body, as far as it is not too large. Raises `Failure`."""
    most, size = settings().gateway_max_file_bytes, 0
    async for part in request.stream():
        size += len(part)
        if size > most + _AROUND:
            raise Failure(413, f"a file must have at most {most} bytes", code="request_too_large")
        yield part


async def list_files(request: Request) -> Response:
    found = await files.listed()
    purpose = request.query_params.get("purpose")
    shown = [file.shown() for file in found if purpose in (None, file.purpose)]
    return json_answer(listed(shown, request.query_params, most=files.MOST_LISTED, usual=files.MOST_LISTED))


async def get_file(request: Request) -> Response:
    return json_answer((await files.get(request.path_params["id"])).shown())


async def get_content(request: Request) -> Response:
    file = await files.get(request.path_params["id"])
    headers = {"content-length": str(file.bytes)}
    return StreamingResponse(files.content(file), media_type="application/octet-stream", headers=headers)


async def delete_file(request: Request) -> Response:
    file = await files.get(request.path_params["id"])
    await files.delete(file)
    return json_answer({"id": file.id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> Response:
    return json_answer(await jobs.shown(await jobs.create(await request_body.read(request, CreateBatch))))


async def list_batches(request: Request) -> Response:
    page = listed([{"id": record.id, "record": record} for record in await jobs.listed()], request.query_params)
    return json_answer({**page, "data": [await jobs.shown(one["record"]) for one in page["data"]]})


async def get_batch(request: Request) -> Response:
    return json_answer(await jobs.shown(await jobs.get(request.path_params["id"])))


async def cancel_batch(request: Request) -> Response:
    return json_answer(await jobs.shown(await jobs.cancel(await jobs.get(request.path_params["id"]))))


def routes() -> list[Route]:
    """Below /v1."""
    return [
        Route("/files", upload, methods=["POST"]),
        Route("/files", list_files, methods=["GET"]),
        Route("/files/{id}", get_file, methods=["GET"]),
        Route("/files/{id}", delete_file, methods=["DELETE"]),
        Route("/files/{id}/content", get_content, methods=["GET"]),
        Route("/batches", create_batch, methods=["POST"]),
        Route("/batches", list_batches, methods=["GET"]),
        Route("/batches/{id}", get_batch, methods=["GET"]),
        Route("/batches/{id}/cancel", cancel_batch, methods=["POST"]),
    ]
