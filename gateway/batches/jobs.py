"""OpenAI's batches: a request becomes a durable batch, and a durable batch is shown as OpenAI shows one."""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from petiole.gateway.batches import files
from petiole.gateway.batches.files import Ends
from petiole.gateway.batches.place import blocking, file_at, place
from petiole.gateway.core.caller import ANYBODY, caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.webhooks import waiting
from petiole.tasks.submission.batches import tape
from petiole.tasks.submission.batches.durable import records, submitting
from petiole.tasks.submission.batches.durable.records import Record, Spec

MOST_HOURS = 24 * 30
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


_Name = Annotated[str, StringConstraints(max_length=64)]
_Value = Annotated[str, StringConstraints(max_length=512)]


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")
    anchor: str
    seconds: int


class CreateBatch(BaseModel):
    model_config = ConfigDict(extra="forbid")
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: str
    metadata: Annotated[dict[_Name, _Value], Field(max_length=16)] | None = None
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
    def output_ends(self) -> Ends:
        asked = self.output_expires_after
        return Ends() if asked is None else Ends.of("output_expires_after", asked.anchor, asked.seconds)


async def create(asked: CreateBatch) -> Record:
    """Raises `Failure`."""
    window_s, ends = asked.window_s, asked.output_ends
    file = await files.get(asked.input_file_id)
    if file.purpose != "batch":
        message = f"input_file_id: must be a file of purpose batch, got one of {file.purpose}"
        raise invalid("input_file_id", message, "invalid_value")
    root, name, asks = await place().root(), records.new_id(), caller()
    until = int(time.time()) + window_s + ends.seconds
    spec = Spec(
        input=file.at,
        output=file_at(root, f"{name}-output", until),
        failures=file_at(root, f"{name}-errors", until),
        lines="openai",
        form={"endpoint": asked.endpoint, **({"watched": True} if await waiting.watching() else {})},
        format="jsonl",
        checks_first=True,
        tenant=asks.name,
        caller={} if asks == ANYBODY else msgspec.to_builtins(asks),
        marker=secrets.token_hex(8),
    )
    facts = {
        "input_file_id": file.id,
        "endpoint": asked.endpoint,
        "completion_window": asked.completion_window,
        "metadata": json.dumps(asked.metadata),
    }

    def begun() -> Record | None:
        tape.mark(spec.output, spec.marker)
        records.create(name, spec, window_s, **facts)
        return records.get(name)

    made = await blocking(begun)
    if made is None:
        raise Failure(503, "the batch was lost while it was made; try again", code="unavailable")
    return made


async def get(name: str) -> Record:
    """Raises `Failure`: 404 if the caller has no such batch."""
    found = None
    if re.fullmatch("batch_[0-9a-f]{24}", name):
        found = await blocking(lambda: records.get(name))
    if found is None or found.spec.tenant != caller().name or not files.of_gateway(found):
        raise Failure(404, f"no batch with id {name[:128]!r} is known", code="not_found", param="batch_id")
    return found


async def listed() -> list[Record]:
    """The caller's, the oldest first."""
    tenant = caller().name
    found = await blocking(lambda: records.listed(tenant))
    return [record for record in reversed(found) if files.of_gateway(record)]


async def cancel(record: Record) -> Record:
    if record.ended:
        message = f"a batch that is {record.status} cannot be cancelled"
        raise Failure(409, message, code="batch_ended", param="batch_id")
    await blocking(lambda: submitting.cancel(record))
    return await get(record.id)


async def shown(record: Record) -> dict[str, Any]:
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
