"""What a recording consists of, whatever its values: keys, fields and their types, each as a path.

    petiole:{ID}:log  list[].token_ids[]  number

A version that leaves all paths of another one's recording leaves all that the other one reads.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.upgrade.recording import Recording

OWNER = re.compile(r"\bhost:\d+:[0-9a-f]{12}\b")
UUID = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
DIGEST = re.compile(r"\b[0-9a-f]{12,}\b")
OF_ONE_TASK = re.compile(r"(?<=petiole:\{)[^}]*|(?<=celery-task-meta-).*")
HELD = re.compile(r"(\d+):", re.ASCII)
REPORT = re.compile(r"[\d.]+ (?=\{)")


def paths(recording: Recording) -> set[str]:
    found = set()
    for entry in recording:
        key = f"{OF_ONE_TASK.sub('ID', _without_names(entry['key']))}  {entry['type']}"
        if entry["type"] == "file":
            found.add(key)
            continue
        found.update(
            f"{key}{path}"
            for path in _of_value(entry["value"], fields=entry["key"].endswith((":state", ":asked")))
        )
    return found


def messages(recording: Recording) -> dict[str, dict[str, Any]]:
    """The messages in queues and in workers' hands, by task id, with the body decoded."""
    found = {}
    for entry in recording:
        if entry["type"] == "list" and re.match(r"petiole(\.|$|\x06)", entry["key"]):
            items = entry["value"]
        elif entry["key"].startswith("petiole:unacked:"):
            items = [_item(held) for held in entry["value"].values()]
        else:
            continue
        for item in items:
            message = json.loads(item)
            message["body"] = json.loads(base64.b64decode(message["body"]))
            found[message["headers"]["id"]] = message
    return found


def _of_value(value: Any, *, fields: bool) -> Iterator[str]:
    """`fields`: the names in a hash are fields, not what it is a hash of."""
    match value:
        case dict():
            for name, one in value.items():
                yield from (f".{_without_names(name) if fields else '*'}{path}" for path in _of_text(one))
        case list():
            for one in value:
                yield from (f"[]{path}" for path in _of_text(one[0] if isinstance(one, list) else one))
        case _:
            yield from _of_text(value)


def _of_text(text: str) -> Iterator[str]:
    """Of JSON, of a worker's report, of a held message, or of plain text."""
    if HELD.match(text) and "{" in text:
        yield from (f" length:queue{path}" for path in _of_text(_item(text)))
    elif report := REPORT.match(text):
        yield from (f" time{path}" for path in _of_text(text[report.end() :]))
    else:
        try:
            yield from _of_json(json.loads(text))
        except ValueError:
            yield f" {re.sub(r'[0-9]+', 'N', _without_names(text))}"


def _of_json(value: Any) -> Iterator[str]:
    match value:
        case dict():
            for name, one in value.items():
                if name == "body":
                    one = json.loads(base64.b64decode(one))
                yield from (f".{name}{path}" for path in _of_json(one))
        case list():
            # Time decides which tokens share a delta, and so which of its lists have places for nothing.
            yield from (f"[]{path}" for one in value if one is not None for path in _of_json(one))
            yield " list"
        case None:
            yield ""
        case bool():
            yield " true or false"
        case int() | float():
            yield " number"
        case _:
            yield " text"


def _without_names(text: str) -> str:
    return DIGEST.sub("DIGEST", UUID.sub("UUID", OWNER.sub("OWNER", text)))


def _item(held: str) -> str:
    """The message in a field of `petiole:unacked:OWNER`: the length of its queue's name, the name, the message."""
    length = HELD.match(held)
    assert length is not None, held
    return held[length.end() + int(length[1]) :]
