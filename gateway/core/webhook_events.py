"""What a webhook is told: a notice that something has ended, or that a budget is used up, or nearly. It is
signed as standard-webhooks has it. Pure.

A notice is told at least once. Its id follows from what it says, so each repetition has the same."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

SECRET_PREFIX = "whsec_"
_SECRET_BYTES = 32
_LONGEST_URL = 2048


class Webhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a tenant's notices go. `secrets`: the newest first; each signs, so that a receiver may change from one
    to the next at its leisure."""

    url: str
    secrets: Sequence[str]


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """`type`: such as `response.completed`. `about`: the id of what has ended. `at`: when, in seconds. `more`:
    what else is told of it."""

    type: str
    about: str
    at: int
    more: Mapping[str, Any] = {}

    def id_for(self, tenant: str) -> str:
        told = f"{tenant}\0{self.type}\0{self.about}"
        return f"evt_{hashlib.sha256(told.encode()).hexdigest()[:32]}"

    def body_for(self, tenant: str) -> bytes:
        """As OpenAI's webhooks have it."""
        return msgspec.json.encode(
            {
                "id": self.id_for(tenant),
                "object": "event",
                "created_at": self.at,
                "type": self.type,
                "data": {"id": self.about, **self.more},
            }
        )


def new_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(_SECRET_BYTES)).decode()


def is_secret(text: str) -> bool:
    """Whether it is one of standard-webhooks: 24 to 64 bytes."""
    try:
        return text.startswith(SECRET_PREFIX) and 24 <= len(_bytes_of(text)) <= 64
    except ValueError:
        return False


def problem(webhook: Webhook) -> tuple[str, str] | None:
    """The field for which a webhook cannot be used, and the rule that it breaks; None: it can be used."""
    try:
        parts = urlsplit(webhook.url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or parts.username is not None or parts.fragment or not re.fullmatch(r"[!-~]+", webhook.url):
        return "url", "must be an http or https URL without a user, a fragment or a space"
    if len(webhook.url) > _LONGEST_URL:
        return "url", f"must have at most {_LONGEST_URL} characters"
    if not webhook.secrets or not all(map(is_secret, webhook.secrets)):
        return "secrets", "must be at least one secret of the form whsec_ and the base64 of 24 to 64 bytes"
    return None


def signed(webhook: Webhook, name: str, body: bytes, now: int) -> dict[str, str]:
    """The headers of a try at this time."""
    told = f"{name}.{now}.".encode() + body
    signatures = [
        f"v1,{base64.b64encode(hmac.digest(_bytes_of(secret), told, 'sha256')).decode()}"
        for secret in webhook.secrets
    ]
    return {"webhook-id": name, "webhook-timestamp": str(now), "webhook-signature": " ".join(signatures)}


def _bytes_of(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
