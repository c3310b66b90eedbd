"""A dialogue made short: the user's messages as they are, and a summary of the dialogue by the model. Pure.

Clients pass the summary back as it is, and need not read it. It is packed, but not secret."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import msgspec

from petiole import json_text
from petiole.contract.errors import shorten
from petiole.tasks.errors import InvalidRequest

KIND = "response.compaction"
MOST_TOKENS = 1024
_PREFIX = "petiole-1."

ASKED = (
    "Summarize the conversation above, so that it can go on from your summary alone. Keep facts, names, numbers, "
    "decisions and open questions. Write nothing but the summary."
)
_TOLD = "A summary of the conversation so far:"


def packed(summary: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(msgspec.json.encode({"summary": summary})).decode()


def unpacked(field: str, text: str) -> str:
    """The summary. Raises `InvalidRequest`."""
    try:
        value: Any = json_text.decode(base64.b64decode(text.removeprefix(_PREFIX), b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError, msgspec.DecodeError):
        value = None
    if not text.startswith(_PREFIX) or not isinstance(value, dict) or not isinstance(value.get("summary"), str):
        raise InvalidRequest(field, "must be what /responses/compact has returned", shorten(text))
    return str(value["summary"])


def told(text: str) -> str:
    """What the model is told in place of the dialogue."""
    return f"{_TOLD}\n{unpacked('encrypted_content', text)}"


def shortened(said: Sequence[dict[str, Any]], name: str, summary: str) -> list[dict[str, Any]]:
    """What stands for these items from now on: what the user has said, and the summary, an item of this name."""
    users = [item for item in said if item["type"] == "message" and item["role"] == "user"]
    return [*users, {"type": "compaction", "id": name, "encrypted_content": packed(summary)}]
