"""OpenAI's batches: a request becomes a durable batch, and a durable batch is shown as OpenAI shows one."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from itertools import takewhile
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, StringConstraints

from petiole.contract.requests.bounds import Bounded, Entries
from petiole.gateway.batches import files, quotas
from petiole.gateway.batches.file_storage import blocking, file_at, place
from petiole.gateway.batches.files import FileExpiry
from petiole.gateway.core.caller import ANYBODY, ClientRequest, caller, request
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.auth import budgets
from petiole.gateway.serving.webhooks import queue
from petiole.tasks.submission.batches import segments
from petiole.tasks.submission.batches.durable import records, submitting
from petiole.tasks.submission.batches.durable.records import BatchRecord, Spec

MOST_HOURS = 24 * 30
RETRIED_FOR_S = 600.0
"""For so long an SDK's retry finds the batch that its first try has made."""
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


_Name = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(Bounded):
    model_config = ConfigDict(extra="forbid")
    anchor: str
    seconds: int


class CreateBatch(Bounded):
    model_config = ConfigDict(extra="forbid")
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: str
    metadata: Annotated[dict[_Name, _Value], Entries(16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        """Raises `Failure`."""
        found = re.fullmatch("([1-9][0-9]{0,3})h", self.completion_window)
        if found is None or int(found[1]) > MOST_HOURS:
            limit = f"must be hours, from 1h to {MOST_HOURS}h"
            shown = f"completion_window: {limit}, got {self.completion_window[:64]!r}"
            raise invalid("completion_window", shown, "invalid_value")
        return 3600 * int(found[1])

    @property
    def output_ends(self) -> FileExpiry:
        asked = self.output_expires_after
        return (
            FileExpiry() if asked is None else FileExpiry.of("output_expires_after", asked.anchor, asked.seconds)
        )


async def create(asked: CreateBatch) -> BatchRecord:
    """Raises `Failure`."""
    window_s, ends = asked.window_s, asked.output_ends
    file = await files.get(asked.input_file_id)
    if file.purpose != "batch":
        message = f"input_file_id: must be a file of purpose batch, got one of {file.purpose}"
        raise invalid("input_file_id", message, "invalid_value")
    if (first := await _repeated()) is not None:
        return first
    await _check_quota()
    root, name, asks, made_by = await place().root(), _new_id(), caller(), request()
    until = int(time.time()) + window_s + ends.seconds
    spec = Spec(
        input=file.at,
        output=file_at(root, f"{name}-output", until),
        failures=file_at(root, f"{name}-errors", until),
        lines="openai",
        form={"endpoint": asked.endpoint, **({"watched": True} if await queue.watching() else {})},
        format="jsonl",
        checks_first=True,
        tenant=asks.name,
        caller={} if asks == ANYBODY else msgspec.to_builtins(asks),
        marker=secrets.token_hex(8),
        most_rows=asks.most("batch_rows"),
    )
    facts = {
        "input_file_id": file.id,
        "endpoint": asked.endpoint,
        "completion_window": asked.completion_window,
        "metadata": json.dumps(asked.metadata),
        "digest": "" if made_by is None else made_by.digest,
        "sense": "" if made_by is None else made_by.sense,
    }

    def begun() -> tuple[bool, BatchRecord | None]:
        segments.mark(spec.output, spec.marker)
        created, found = records.create(name, spec, window_s, **facts), records.get(name)
        if not created and found is not None:  # another try was first: the marker is its
            segments.mark(found.spec.output, found.spec.marker)
        return created, found

    created, made = await blocking(begun)
    if made is None:
        raise Failure(503, "the batch was lost while it was made; try again", code="unavailable")
    if not created and made_by is not None and made_by.digest:  # another request with this key was first
        _check_same(made_by, made)
    try:
        await _check_quota(made)  # others may have begun meanwhile
    except Failure:
        if created:
            await blocking(lambda: _undo(made))
        raise
    return made


async def _check_quota(made: BatchRecord | None = None) -> None:
    """Raises `Failure`: 429 if the caller has too many open batches with one more; with `made`, if that is one too
    many. Those that were made after it do not count: of two at once the first one stays. Or if a budget is used
    up."""
    if made is None:
        await budgets.check(caller())
    if quotas.limited("batches"):
        before = takewhile(lambda one: made is None or one.id != made.id, await listed())
        quotas.check("batches", 1 + sum(not one.ended for one in before))


def _undo(record: BatchRecord) -> None:
    records.remove(record)
    segments.unmark(record.spec.output)


def _new_id() -> str:
    """With an `Idempotency-Key` it follows from the key, so two requests at once make one batch."""
    made, asks = request(), caller()
    if made is None or not made.idempotency_key:
        return records.new_id()
    of = json.dumps([asks.name, asks.key, made.idempotency_key])
    return f"batch_{hashlib.sha256(of.encode()).hexdigest()[:24]}"


async def _repeated() -> BatchRecord | None:
    """The batch that an earlier try of this request has made: by its `Idempotency-Key`, or, for an SDK's retry,
    the only one of the same request that is this new. Raises `Failure`."""
    made = request()
    if made is None or not made.digest:
        return None
    if made.idempotency_key:
        name = _new_id()
        found = await blocking(lambda: records.get(name))
        if found is not None:
            _check_same(made, found)
        return found
    if not made.retries:
        return None
    since = time.time() - RETRIED_FOR_S
    same = [
        record
        for record in await listed()
        if record.facts.get("digest") == made.digest and record.number("created_at") >= since
    ]
    return same[0] if len(same) == 1 else None


def _check_same(made: ClientRequest, found: BatchRecord) -> None:
    """Raises `Failure` if the batch that has the request's `Idempotency-Key` is that of another request."""
    if not made.says(found.facts.get("digest", ""), found.facts.get("sense", "")):
        raise invalid(None, "Idempotency-Key: was used for another request", "idempotency_key_reused")


async def get(name: str) -> BatchRecord:
    """Raises `Failure`: 404 if the caller has no such batch."""
    found = None
    if re.fullmatch("batch_[0-9a-f]{24}", name):
        found = await blocking(lambda: records.get(name))
    if found is None or found.spec.tenant != caller().name or not files.of_gateway(found):
        raise Failure(404, f"no batch with id {name[:128]!r} is known", code="not_found", param="batch_id")
    return found


async def listed() -> list[BatchRecord]:
    """The caller's, the oldest first."""
    tenant = caller().name
    found = await blocking(lambda: records.listed(tenant))
    return [record for record in reversed(found) if files.of_gateway(record)]


async def cancel(record: BatchRecord) -> BatchRecord:
    if record.ended:
        message = f"a batch that is {record.status} cannot be cancelled"
        raise Failure(409, message, code="batch_ended", param="batch_id")
    await blocking(lambda: submitting.cancel(record))
    return await get(record.id)


async def shown(record: BatchRecord) -> dict[str, Any]:
    """As OpenAI shows a batch."""
    facts = record.facts
    output, errors = [await files.of_batch(record, part) for part in ("output", "errors")]
    failed, ended = record.number("failed"), record.number("ended")
    tokens = {name: record.number(f"{name}_tokens") for name in ("prompt", "cached_prompt", "completion")}
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": facts["endpoint"],
        "errors": {"object": "list", "data": [_error(one) for one in record.errors]} if record.errors else None,
        "input_file_id": facts["input_file_id"],
        "completion_window": facts["completion_window"],
        "status": record.status,
        "output_file_id": None if output is None else output.id,
        "error_file_id": None if errors is None else errors.id,
        "created_at": record.number("created_at"),
        "expires_at": record.number("expires_at"),
        **{f"{status}_at": record.time_of(status) for status in _TIMES},
        "request_counts": {"total": record.number("rows"), "completed": ended - failed, "failed": failed},
        "usage": {
            "input_tokens": tokens["prompt"],
            "input_tokens_details": {"cached_tokens": tokens["cached_prompt"]},
            "output_tokens": tokens["completion"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens["prompt"] + tokens["completion"],
        },
        "metadata": json.loads(facts.get("metadata") or "null"),
    }


def _error(fault: dict[str, Any]) -> dict[str, Any]:
    row = fault.get("row")
    return {
        "code": fault.get("code"),
        "message": fault.get("message"),
        "param": fault.get("param"),
        "line": None if row is None else row + 1,
    }
