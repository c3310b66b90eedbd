"""Keys and their tenants, where they are stored.

A key is 32 random bytes, so its SHA-256 alone is stored: nobody finds the key by trying, and a slow hash, which
protects what people make up, would only cost time. Keys stand in `PETIOLE_GATEWAY_KEYS` (or in the file that
`PETIOLE_GATEWAY_KEYS_FILE` names) and in Redis:

    KEYS     hash: by a key's SHA-256, a `Key` as JSON
    TENANTS  hash: by name, a `Tenant` as JSON
    WEBHOOKS hash: by a tenant's name, a `Webhook` as JSON. "" is everybody's, where there are no keys"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import re
import secrets

import msgspec

from petiole.gateway.core import caller, webhook_events
from petiole.gateway.core.caller import NAME, Key, Tenant
from petiole.gateway.core.webhook_events import Webhook
from petiole.gateway.serving.retry import patiently
from petiole.tasks.servers import connections
from petiole.tasks.settings import invalid, settings
from petiole.tasks.wire.keys import gateway_key

KEYS, TENANTS, WEBHOOKS = map(gateway_key, ("/keys", "/tenants", "/webhooks"))
_PREFIX = "ptl-"
_SHOWN = 12


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """`PETIOLE_GATEWAY_KEYS`: tenants by name, keys by their SHA-256, webhooks by their tenants."""

    tenants: dict[str, Tenant] = {}
    keys: dict[str, Key] = {}
    webhooks: dict[str, Webhook] = {}


def new() -> str:
    """A new key, of 256 bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def name_of(digest: str) -> str:
    """By what people tell a key."""
    return digest[:_SHOWN]


def of_settings() -> Document:
    """Raises `InvalidSettings`."""
    return _read(settings().gateway_keys.get_secret_value())


@functools.lru_cache(maxsize=1)
def _read(text: str) -> Document:
    """Keys are looked up all the time, and the settings seldom change."""
    try:
        document = msgspec.json.decode(text, type=Document) if text else Document()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("gateway_keys", f"must be JSON of tenants and keys ({error})", "other text") from None
    if missing := sorted({key.tenant for key in document.keys.values()} - document.tenants.keys()):
        raise invalid("gateway_keys", "must have the tenant of each key", f"none called {missing[0]}")
    if unsalted := [name for name, tenant in document.tenants.items() if not tenant.salt]:
        raise invalid("gateway_keys", "must have a salt for each tenant", f"none for {unsalted[0]}")
    if unnamed := [name for name in document.tenants if not re.fullmatch(NAME, name)]:
        raise invalid("gateway_keys", f"must have tenants with names of the form {NAME}", unnamed[0])
    parts: dict[str, Tenant | Key] = {f"tenants.{name}": one for name, one in document.tenants.items()}
    parts |= {f"keys.{name_of(digest)}": key for digest, key in document.keys.items()}
    for where, one in parts.items():
        if wrong := caller.problem(one):
            field, limit, value = wrong
            raise invalid("gateway_keys", f"{where}.{field}: {limit}", value)
    for name, webhook in document.webhooks.items():
        if found := webhook_events.problem(webhook):
            field, limit = found
            raise invalid("gateway_keys", f"webhooks.{name}.{field}: {limit}", "another")
    return document


async def tenants() -> dict[str, Tenant]:
    """All of them, by name, without those in Redis that cannot be read. Raises `Failure`."""
    found: dict[str, Tenant] = {}
    [stored] = await patiently(lambda: connections.aperform([("HGETALL", TENANTS)]))
    for name, raw in stored.items():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found[name.decode()] = msgspec.json.decode(raw, type=Tenant)
    return found | of_settings().tenants


async def tenant(name: str, new: bool = False) -> Tenant | None:
    """None: it is unknown. `new`: then it is made. Raises `Failure`, and `msgspec.MsgspecError` if it cannot be
    read."""
    if (own := of_settings().tenants.get(name)) is not None:
        return own
    client = connections.async_streams()
    stored = await patiently(lambda: client.hget(TENANTS, name))
    if stored is None and new:
        made = msgspec.json.encode(new_tenant())
        await patiently(lambda: client.hsetnx(TENANTS, name, made))
        stored = await patiently(lambda: client.hget(TENANTS, name))  # another gateway may have been first
    return msgspec.json.decode(stored, type=Tenant) if isinstance(stored, bytes) else None


def new_tenant() -> Tenant:
    return Tenant(salt=secrets.token_hex(16))


async def key_of(digest: str) -> Key | None:
    """None: it is unknown. Raises `Failure`, and `msgspec.MsgspecError` if it cannot be read."""
    for stored, key in of_settings().keys.items():
        if hmac.compare_digest(stored, digest):
            return key
    raw = await patiently(lambda: connections.async_streams().hget(KEYS, digest))
    return msgspec.json.decode(raw, type=Key) if isinstance(raw, bytes) else None


async def any_keys() -> bool:
    """Whether Redis has one."""
    return bool(await patiently(lambda: connections.async_streams().exists(KEYS)))
