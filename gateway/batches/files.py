"""Files: their content in the storage, what is known of them in Redis. A tenant finds its own.

What a batch writes is a file, too. Its id and all that is known of it follow from the batch."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from petiole.gateway.batches import quotas
from petiole.gateway.batches.file_storage import below_root, blocking, file_at, place
from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.submission.batches.durable.records import BatchRecord
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.wire.keys import gateway_key
from petiole.tasks.wire.record import scripts

SHORTEST_S, LONGEST_S = 3600, 30 * 86_400
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
MOST_LISTED = 10_000
MOST_CHARACTERS = 255
"""The longest name of a file."""
_BLOCK = 2**20
_LIST = scripts.sources(Path(__file__).parent, {})["list"]
_LISTED = "/files"
_PARTS = {"output": "output", "errors": "failures"}


class File(msgspec.Struct, frozen=True):
    id: str
    at: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    def shown(self) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.to_builtins(self)
        del facts["at"]
        return {**facts, "object": "file", "status": "processed", "status_details": None}


class FileExpiry(NamedTuple):
    """When a file that is made now expires."""

    seconds: int = LONGEST_S

    @classmethod
    def of(cls, field: str, anchor: object, seconds: object) -> FileExpiry:
        """Raises `Failure`."""
        if anchor is None and seconds is None:
            return cls()
        if anchor != "created_at":
            raise invalid(f"{field}[anchor]", f"{field}[anchor]: must be created_at, got {str(anchor)[:64]!r}")
        if not (isinstance(seconds, int) and SHORTEST_S <= seconds <= LONGEST_S):
            limit = f"must be a number from {SHORTEST_S} to {LONGEST_S}"
            raise invalid(f"{field}[seconds]", f"{field}[seconds]: {limit}, got {str(seconds)[:64]!r}")
        return cls(seconds)


async def create(content: IO[bytes], filename: str, purpose: str, ends: FileExpiry) -> File:
    """Raises `Failure`: 429 if the caller has too many."""
    root = await place().root()
    await place().sweep(root)
    await _check_quota(content.seek(0, os.SEEK_END))
    now, name = int(time.time()), f"file-{secrets.token_hex(12)}"
    at = file_at(root, name, now + ends.seconds)

    def written() -> int:
        content.seek(0)
        with storage.written(at) as file:
            shutil.copyfileobj(content, file, _BLOCK)
        return content.tell()

    shown = filename[:MOST_CHARACTERS].encode(errors="replace").decode()  # in a form's charset it may be anything
    made = File(name, at, await blocking(written), now, now + ends.seconds, shown, purpose)
    commands: list[tuple[Any, ...]] = [
        ("SET", _key(name), msgspec.json.encode(made), "EX", ends.seconds),
        ("EVAL", _LIST, 1, _key(_LISTED), now, name, LONGEST_S),
    ]
    await patiently(lambda: connections.aperform(commands))
    try:
        await _check_quota(made.bytes, made)  # others may have been made meanwhile
    except Failure:
        await delete(made)
        raise
    return made


async def _check_quota(size: int, made: File | None = None) -> None:
    """With one file of this size more. `made`: it is there. Those that were made after it do not count: of two at
    once the first one stays. Raises `Failure`."""
    if not quotas.limited("files", "file_bytes"):
        return
    before = takewhile(lambda one: made is None or one.id != made.id, await _uploaded())
    sizes = [size, *(file.bytes for file in before)]
    quotas.check("files", len(sizes))
    quotas.check("file_bytes", sum(sizes))


async def get(name: str) -> File:
    """Raises `Failure`: 404 if the caller has no such file."""
    await place().root()
    missing = Failure(404, f"no file with id {name[:128]!r} is known", code="not_found", param="file_id")
    if found := re.fullmatch("file-(batch_[0-9a-f]{24})-(output|errors)", name):
        record = await blocking(lambda: records.get(found[1]))
        known = record is not None and record.spec.tenant == caller().name and of_gateway(record)
        made = await of_batch(record, found[2]) if record is not None and known else None
        if made is None:
            raise missing
        return made
    if not re.fullmatch("file-[0-9a-f]{24}", name):
        raise missing
    [raw] = await patiently(lambda: connections.aperform([("GET", _key(name))]))
    if not isinstance(raw, bytes):
        raise missing
    return msgspec.json.decode(raw, type=File)


def of_gateway(record: BatchRecord) -> bool:
    """Whether it was made by a request, and not by `petiole batch`."""
    return "endpoint" in record.facts


async def of_batch(record: BatchRecord, part: str) -> File | None:
    """What a batch that has ended has written. `part`: output or errors. None: nothing."""
    at = getattr(record.spec, _PARTS[part])
    if not record.ended or at is None:
        return None
    if (size := await blocking(lambda: storage.size(at))) is None:
        return None
    ends = int(at.rpartition(".")[2])
    name, since = f"{record.id}_{part}.jsonl", record.time_of(record.status) or 0
    return File(f"file-{record.id}-{part}", at, size, since, ends, name, "batch_output")


async def listed() -> list[File]:
    """The caller's, the oldest first."""
    await place().root()
    files, tenant = await _uploaded(), caller().name
    for record in await blocking(lambda: records.listed(tenant)):
        if of_gateway(record):
            files += [made for part in _PARTS if (made := await of_batch(record, part)) is not None]
    return sorted(files, key=lambda file: (file.created_at, file.id))


async def _uploaded() -> list[File]:
    """The caller's uploads: files that no batch has written. Files that have expired leave the list."""
    key = _key(_LISTED)
    [raw] = await patiently(lambda: connections.aperform([("ZRANGE", key, 0, -1)]))
    names = [name.decode() for name in raw]
    found = await patiently(lambda: connections.aperform([("GET", _key(name)) for name in names])) if names else []
    if gone := [name for name, one in zip(names, found, strict=True) if one is None]:
        await patiently(lambda: connections.aperform([("ZREM", key, *gone)]))
    return [msgspec.json.decode(one, type=File) for one in found if isinstance(one, bytes)]


async def delete(file: File) -> None:
    await blocking(lambda: storage.remove(file.at))
    commands = [("DEL", _key(file.id)), ("ZREM", _key(_LISTED), file.id)]
    await patiently(lambda: connections.aperform(commands))


def content(file: File) -> Iterator[bytes]:
    """Blocks. Raises `StorageError`."""
    with below_root():
        opened = storage.opened(file.at)
    with opened:
        while block := opened.read(_BLOCK):
            yield block


def number(text: str | None) -> int | str | None:
    """A form's field as a number, where it is one."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 12 else text


def of_form(fields: Mapping[str, str]) -> tuple[str, FileExpiry]:
    """Purpose, and when it expires. Raises `Failure`."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise invalid("purpose", "purpose: is required", "missing_required_parameter")
    if purpose not in PURPOSES:
        limit = f"must be one of {', '.join(PURPOSES)}"
        raise invalid("purpose", f"purpose: {limit}, got {purpose[:64]!r}", "invalid_value")
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    return purpose, FileExpiry.of("expires_after", anchor, number(seconds))


def _key(name: str) -> str:
    return gateway_key(caller().place_of(name))
