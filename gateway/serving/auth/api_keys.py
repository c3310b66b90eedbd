"""Finds the caller of a key.

A key is 32 random bytes, so its SHA-256 alone is stored: nobody finds the key by trying, and a slow hash, which
protects what people make up, would only cost time. Keys stand in `PETIOLE_GATEWAY_KEYS` (or in the file that
`PETIOLE_GATEWAY_KEYS_FILE` names) and in Redis:

    KEYS     hash: by a key's SHA-256, a `Key` as JSON
    TENANTS  hash: by name, a `Tenant` as JSON
    WEBHOOKS hash: by a tenant's name, a `Webhook` as JSON. "" is everybody's, where there are no keys

What was looked up counts for `KNOWN_FOR_S`: as long a revoked key may still be used. A gateway that has seen a key
never again answers somebody without one, even if Redis loses its keys."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict

import msgspec
from starlette.types import Scope

from petiole.gateway.core.caller import ANYBODY, BUDGETS, NAME, Caller, Key, Tenant
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.webhook_events import Webhook, problem
from petiole.gateway.serving.retry import patiently
from petiole.tasks.keys import gateway_key
from petiole.tasks.servers import connections
from petiole.tasks.settings import invalid, settings

KEYS, TENANTS, WEBHOOKS = map(gateway_key, ("/keys", "/tenants", "/webhooks"))
KNOWN_FOR_S = 5.0
UNKNOWN_FOR_S = 0.5
MOST_KNOWN = 10_000
DENIED = 3000
"""What a WebSocket without a key is closed with: IANA's "unauthorized"."""
_required = False
_PREFIX = "ptl-"
_SHOWN = 12


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """`PETIOLE_GATEWAY_KEYS`: tenants by name, keys by their SHA-256, webhooks by their tenants."""

    tenants: dict[str, Tenant] = {}
    keys: dict[str, Key] = {}
    webhooks: dict[str, Webhook] = {}


def require() -> None:
    """From now on this process answers nobody without a key, even if Redis has none."""
    global _required
    _required = True


def new() -> str:
    """A new key, of 256 bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def key_in(scope: Scope) -> str | None:
    """The key that the client has sent."""
    for name, value in scope["headers"]:
        if name == b"x-api-key" and value:
            return str(value.decode("latin-1"))
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1")) or None
    return None


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def name_of(digest: str) -> str:
    """By what people tell a key."""
    return digest[:_SHOWN]


def of_settings() -> Document:
    """Raises `InvalidSettings`."""
    text = settings().gateway_keys.get_secret_value()
    try:
        document = msgspec.json.decode(text, type=Document) if text else Document()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid("gateway_keys", f"must be JSON of tenants and keys ({error})", "other text") from None
    if missing := sorted({key.tenant for key in document.keys.values()} - document.tenants.keys()):
        raise invalid("gateway_keys", "must have the tenant of each key", f"none called {missing[0]}")
    if unsalted := [name for name, tenant in document.tenants.items() if not tenant.salt]:
        raise invalid("gateway_keys", "must have a salt for each tenant", f"none for {unsalted[0]}")
    if wrong := [name for name in document.tenants if not re.fullmatch(NAME, name)]:
        raise invalid("gateway_keys", f"must have tenants with names of the form {NAME}", wrong[0])
    for digest, key in document.keys.items():
        if named := [name for name in BUDGETS if getattr(key.limits, name) is not None]:
            raise invalid(
                "gateway_keys", f"{named[0]} must be a limit of a tenant", f"one of key {name_of(digest)}"
            )
    for name, webhook in document.webhooks.items():
        if found := problem(webhook):
            field, limit = found
            raise invalid("gateway_keys", f"webhooks.{name}.{field}: {limit}", "another")
    return document


async def tenants() -> dict[str, Tenant]:
    """All of them, by name, without those in Redis that cannot be read. Raises `Failure`."""
    found: dict[str, Tenant] = {}
    for name, raw in (await patiently(lambda: connections.async_streams().hgetall(TENANTS))).items():
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            found[name.decode()] = msgspec.json.decode(raw, type=Tenant)
    return found | of_settings().tenants


class KeyCache:
    """What an event loop knows of keys."""

    def __init__(self) -> None:
        self._own = of_settings()
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()
        self._asks_for_keys = _required or bool(self._own.keys)
        self._looked_at = float("-inf")

    async def of(self, key: str | None) -> Caller:
        """Who has this key. Raises `Failure`: 401 for an unknown or expired one, and for none where there are
        keys."""
        if key is None:
            if await self._keys_exist():
                raise Failure(401, "a key is needed: Authorization: Bearer KEY", code="missing_api_key")
            return ANYBODY
        digest = digest_of(key)
        known = self._known.get(digest)
        if known is None or time.monotonic() > known[0]:
            found = await self._looked_up(digest)
            known = time.monotonic() + (KNOWN_FOR_S if found else UNKNOWN_FOR_S), found
            self._known[digest] = known
            self._known.move_to_end(digest)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        if (who := known[1]) is not None:
            if who.expires and time.time() >= who.expires:
                ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(who.expires))
                raise Failure(401, f"the key expired at {ended}: see `petiole keys set`", code="invalid_api_key")
            return who
        if await self._keys_exist():
            raise Failure(401, "the key is not known, or was revoked", code="invalid_api_key")
        return ANYBODY  # SDKs send some key always

    async def _looked_up(self, digest: str) -> Caller | None:
        for stored, key in self._own.keys.items():
            if hmac.compare_digest(stored, digest):
                return _caller(digest, key, self._own.tenants[key.tenant])
        client = connections.async_streams()
        raw = await patiently(lambda: client.hget(KEYS, digest))
        if not isinstance(raw, bytes):
            return None
        self._asks_for_keys = True
        try:
            key = msgspec.json.decode(raw, type=Key)
            stored_tenant = await patiently(lambda: client.hget(TENANTS, key.tenant))
            if not isinstance(stored_tenant, bytes):
                return None
            return _caller(digest, key, msgspec.json.decode(stored_tenant, type=Tenant))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Failure(500, "what is stored of this key cannot be read", code="server_error") from None

    async def _keys_exist(self) -> bool:
        if self._asks_for_keys:
            return True
        if time.monotonic() - self._looked_at > KNOWN_FOR_S:
            client = connections.async_streams()
            self._asks_for_keys = bool(await patiently(lambda: client.exists(KEYS)))
            self._looked_at = time.monotonic()
        return self._asks_for_keys


def _caller(digest: str, key: Key, tenant: Tenant) -> Caller:
    return Caller(key.tenant, name_of(digest), tenant, key.limits, key.expires)


callers = connections.PerLoop(KeyCache)
"""The running event loop's."""
