"""OpenAI's batch lines, as a form of `petiole batch`: a line is a request of one of `kinds`, and its answer has
the body that the same request gets over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from petiole.contract.errors import shorten
from petiole.gateway.batches.kinds import KINDS, Answer, BatchEndpoint
from petiole.gateway.core import caller
from petiole.gateway.core.caller import ANYBODY, Caller, as_caller
from petiole.gateway.core.failures import Failure, failure_of, invalid
from petiole.gateway.core.foreign import unknown
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.openai.answers import error_body
from petiole.gateway.serving import request_body
from petiole.gateway.serving.webhooks import queue
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute, directory
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.rows import row_types
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import Fault, NotRun, RowTask, RowWork
from petiole.tasks.submission.batches.rows.sources import Row

MOST_ID_CHARACTERS = 512
_UNKNOWN = "model_not_found"


class BatchLines:
    """`endpoint`: the only one that lines may name; None: any. `caller`: a `Caller` as JSON, whose lines they
    are. `watched`: its tenant has a webhook, which the settings of this process may not name."""

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
        caller: Mapping[str, Any] | None = None,
        watched: bool = False,
    ) -> None:
        if options:
            name = min(options)
            raise InvalidRequest(name, "must be in the lines' bodies: they are OpenAI's", shorten(options[name]))
        self._endpoint, self._watched = endpoint, watched
        self._caller = ANYBODY if caller is None else msgspec.convert(caller, Caller)

    def about(self) -> dict[str, Any]:
        return {"lines": "openai", **({"endpoint": self._endpoint} if self._endpoint else {})}

    def work(self, row: Row) -> RowWork:
        plan, answer, ignored = self._plan(row)
        where = {"queue": plan.record.queue} if plan.record.queue != settings().queue else {}
        submission = caller.submission(self._caller, where)
        calls = [
            RowTask(f"tasks.{call.task}", {**caller.options(self._caller, call.options), **submission})
            for call in plan.calls
        ]
        return RowWork(calls, partial(_line, row, replace(plan, calls=()), answer, ignored))

    def beginning(self, row: Row) -> str:
        try:
            body = row.value().get("body")
        except InvalidRequest:
            return ""
        if not isinstance(body, dict):
            return ""
        return row_types.beginning_of(body, (body.get("model"), body.get("cache_salt")))

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        """Lines that are no requests, and ids that two lines have. What is wrong in a body is its line's alone."""
        seen: dict[int, int] = {}
        for row in rows:
            try:
                custom_id = self._request_of(row)[0]
            except InvalidRequest as error:
                yield Fault("invalid_request", f"{error.field}: {error.limit}", row.number, error.field)
                continue
            name = int.from_bytes(blake2b(custom_id.encode(errors="surrogatepass"), digest_size=8).digest())
            if (first := seen.setdefault(name, row.number)) != row.number:
                message = f"custom_id: must be another than that of line {first + 1}"
                yield Fault("duplicate_custom_id", message, row.number, "custom_id")

    def told(self, name: str, status: str, at: int) -> None:
        """Tells the webhook of the batch's tenant, if there is one."""

        async def tell() -> None:
            with as_caller(self._caller):
                tell_it = queue.add if self._watched else queue.notify
                await tell_it(f"batch.{status}", name, at)

        asyncio.run(tell())

    def refusal(self, row: Row, error: Exception) -> OutputLine:
        if isinstance(error, NotRun):
            shown = {"code": error.code, "message": str(error)}
            return OutputLine(False, {**_head(row), "response": None, "error": shown})
        cause = error.__cause__
        return _refused(row, cause if isinstance(cause, Failure) else failure_of(error))

    def _plan(self, row: Row) -> tuple[Plan, Answer, str]:
        """Raises `InvalidRequest`, caused by a `Failure` if the body is wrong, and `Unavailable`."""
        _, url, body = self._request_of(row)
        try:
            return self._made(row, KINDS[url], body)
        except Failure as failure:
            raise InvalidRequest(failure.param or "body", failure.message, "the line") from failure

    def _request_of(self, row: Row) -> tuple[str, str, object]:
        """A line's `custom_id`, `url` and `body`. Raises `InvalidRequest`."""
        value = row.value()
        custom_id, method, url = (value.get(name) for name in ("custom_id", "method", "url"))
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID_CHARACTERS:
            limit = f"must be text of 1 to {MOST_ID_CHARACTERS} characters"
            raise InvalidRequest("custom_id", limit, shorten(custom_id))
        if method != "POST":
            raise InvalidRequest("method", 'must be "POST"', shorten(method))
        if not isinstance(url, str) or url not in KINDS or (self._endpoint is not None and url != self._endpoint):
            known = self._endpoint or " or ".join(KINDS)
            raise InvalidRequest("url", f"must be {known}", shorten(url))
        if unknown := sorted(value.keys() - {"custom_id", "method", "url", "body"}):
            raise InvalidRequest(unknown[0], "is not part of a batch's line", shorten(value[unknown[0]]))
        return custom_id, url, value.get("body")

    def _made(self, row: Row, kind: BatchEndpoint, body: object) -> tuple[Plan, Answer, str]:
        """With what is ignored of the body. Raises `Failure`."""
        if not isinstance(body, dict):
            raise invalid("body", f"body: must be a JSON object, got {shorten(body)}", "invalid_type")
        asked: Any = request_body.as_request(body, kind.body)
        name, found = f"{kind.prefix}{row.digest:016x}{row.number:x}", self._found(asked.model)
        try:
            return *kind.planned(asked, name, int(time.time()), found), unknown.told(asked.ignored)
        except InvalidRequest as error:
            raise failure_of(error) from None

    def _found(self, model: str) -> ModelRoute:
        """Raises `Failure`."""
        if not self._caller.may_ask(model):
            raise invalid(
                "model", f"model: must be one that the key may ask for, got {shorten(model)}", _UNKNOWN, 404
            )
        own = self._caller.tenant.queue
        try:
            return directory.find(model, own or settings().queue, own)
        except InvalidRequest as error:
            raise invalid("model", str(error), _UNKNOWN, 404) from None


def _line(row: Row, plan: Plan, answer: Answer, ignored: str, outcomes: Sequence[TaskOutcome]) -> OutputLine:
    try:
        return _answered(row, 200, answer(plan, outcomes), ignored)
    except Failure as failure:
        return _refused(row, failure)


def _answered(row: Row, status: int, body: dict[str, Any], ignored: str = "") -> OutputLine:
    """OpenAI's line: with an answer, or with the error that it would have had over HTTP. `ignored`: what
    the header would have named."""
    answer: dict[str, Any] = {"status_code": status, "request_id": f"req_{row.digest:016x}", "body": body}
    if ignored:
        answer["ignored"] = ignored
    return OutputLine(status == 200, {**_head(row), "response": answer, "error": None})


def _refused(row: Row, failure: Failure) -> OutputLine:
    return _answered(row, failure.status, error_body(failure))


def _head(row: Row) -> dict[str, Any]:
    try:
        custom_id = row.value().get("custom_id")
    except InvalidRequest:
        custom_id = None
    return {"id": f"batch_req_{row.digest:016x}{row.number:x}", "custom_id": custom_id}
