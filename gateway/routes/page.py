"""The handlers of the page: its files, and the fleet as JSON."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.page import fleet
from petiole.gateway.serving import records
from petiole.gateway.serving.answering import json_answer
from petiole.gateway.serving.catalogue import catalogue
from petiole.gateway.serving.retry import failure_of, patiently
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.fleet import control, queues, reports
from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.servers import connections

HERE = Path(__file__).parents[1] / "page"
FILES = frozenset(path.name for path in HERE.iterdir() if path.suffix in (".css", ".js", ".svg"))
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Whatever a model writes, nothing from elsewhere is run or loaded."""

SEEN_FOR_S = 1.0


async def index(request: Request) -> Response:
    return _file(request, "index.html")


async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        raise Failure(404, "there is no such path", code="not_found")
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    body, tag = _read(name)
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=mimetypes.guess_type(name)[0])


@cache
def _read(name: str) -> tuple[bytes, str]:
    body = (HERE / name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'


# ---------------------------------------------------------------- the fleet


class ReportCache:
    """The reports that an event loop has read recently: many may look, and Redis is asked once a second."""

    def __init__(self) -> None:
        self._workers: Sequence[WorkerReport] = ()
        self._queues: Sequence[QueueReport] | None = None
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()

    async def seen(self) -> tuple[Sequence[WorkerReport], Sequence[QueueReport] | None]:
        async with self._reading:
            if time.monotonic() - self._read_at > SEEN_FOR_S:
                self._workers = await workers()
                try:
                    self._queues = await LOOKUPS.run(queues.report_queues, self._workers)
                except Exception:  # any broker's: it may be away, or closed to producers
                    self._queues = None
                self._read_at = time.monotonic()
            return self._workers, self._queues


watch = connections.PerLoop(ReportCache)


async def workers() -> list[WorkerReport]:
    try:
        return await patiently(lambda: LOOKUPS.run(reports.workers))
    except Failure:
        raise
    except Exception as error:
        raise failure_of(error) from error


async def show(_: Request) -> Response:
    workers, queues = await watch().seen()
    known = await records.known([one.record for one in fleet.generations(workers)])
    return json_answer(fleet.shown(workers, queues, await catalogue().shown(), known, caller()))


async def cancel(request: Request) -> Response:
    handle = request.path_params["handle"]
    for one in fleet.generations(await workers()):
        if one.handle == handle and fleet.is_shown(one, await records.known([one.record]), caller()):
            await patiently(partial(control.acancel, one.task_id))
            return json_answer({"handle": handle, "cancelled": True})
    raise Failure(404, "no such generation runs now", code="not_found", param="handle")


def routes() -> list[BaseRoute]:
    """At the root."""
    return [Route("/", index, methods=["GET"]), Route("/page/{name}", file, methods=["GET"])]


def routes_of_the_fleet() -> list[BaseRoute]:
    """Below /v1."""
    return [
        Route("/fleet", show, methods=["GET"]),
        Route("/fleet/generations/{handle}/cancel", cancel, methods=["POST"]),
    ]
