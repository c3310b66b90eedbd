"""What was asked, and which tasks answer it."""

from __future__ import annotations

from typing import Any

import msgspec

from petiole import json_text


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a request, as it is in Redis. Later versions may add fields with defaults; none changes.

    `asked`: the fields of the request that its view reads. A view of an old record must give what it gave."""

    id: str
    """The id that the client has, such as `chatcmpl-…`."""
    kind: str
    """Which view shows it, such as `chat.completion`."""
    created: int
    """Unix time, in seconds."""
    model: str
    """The name by which the client asked for it."""
    tasks: list[str]
    """The ids of the tasks: one for each choice."""
    asked: dict[str, Any] = {}
    queue: str = ""
    """Where the tasks were submitted."""
    readers: bool = False
    """Whether the tasks are cancelled if nobody reads them."""
    patient: bool = False
    """Whether the tasks wait for a worker for as long as it takes. Otherwise who follows them gives them up."""


def dump(record: RequestRecord) -> bytes:
    return msgspec.json.encode(record)


_decoder = msgspec.json.Decoder(RequestRecord, float_hook=json_text.number)


def load(raw: bytes) -> RequestRecord:
    """Raises `msgspec.MsgspecError`."""
    return _decoder.decode(raw)
