"""Finds the caller of a request: by a key, or by a token of the issuer that the settings name.

What was looked up counts for `KNOWN_FOR_S`: for that long a revoked key may still be used. A gateway that has seen
a key never again answers somebody without one, even if Redis loses its keys."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from petiole.gateway.core.caller import ANYBODY, Caller, caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.auth import api_keys
from petiole.gateway.serving.auth.api_keys import digest_of, name_of
from petiole.tasks.servers import connections
from petiole.tasks.settings import invalid, settings

if TYPE_CHECKING:
    from petiole.gateway.serving.auth.web_tokens import Tokens

Handler = Callable[[Request], Awaitable[Response]]

KNOWN_FOR_S = 5.0
UNKNOWN_FOR_S = 0.5
MOST_KNOWN = 10_000
DENIED = 3000
"""What a WebSocket without a key is closed with: IANA's "unauthorized"."""
_required = False


def require() -> None:
    """From now on this process answers nobody without a key, even if Redis has none."""
    global _required
    _required = True


def key_in(scope: Scope) -> str | None:
    """The key that the client has sent."""
    for name, value in scope["headers"]:
        if name == b"x-api-key" and value:
            return str(value.decode("latin-1"))
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1")) or None
    return None


class KeyCache:
    """What an event loop knows of keys. Raises `InvalidSettings`."""

    def __init__(self) -> None:
        self._tokens = _tokens()
        self._known: OrderedDict[str, tuple[float, Caller | None]] = OrderedDict()
        self._asks_for_keys = _required or bool(api_keys.of_settings().keys or self._tokens)
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
            found = await self._looked_up(key, digest)
            known = time.monotonic() + (KNOWN_FOR_S if found else UNKNOWN_FOR_S), found
            self._known[digest] = known
            self._known.move_to_end(digest)
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)
        if (who := known[1]) is not None:
            if who.expires and time.time() >= who.expires:
                if (tokens := self._tokens_if(key)) is not None:
                    await tokens.caller_of(key)  # it says so of a token, unless it is the tenant that expired
                ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(who.expires))
                raise Failure(401, f"the key expired at {ended}: see `petiole keys set`", code="invalid_api_key")
            return who
        if await self._keys_exist():
            raise Failure(401, "the key is not known, or was revoked", code="invalid_api_key")
        return ANYBODY  # SDKs send some key always

    async def _looked_up(self, key: str, digest: str) -> Caller | None:
        try:
            if (tokens := self._tokens_if(key)) is not None:
                return await tokens.caller_of(key)
            found = await api_keys.key_of(digest)
            if found is None:
                return None
            self._asks_for_keys = True
            tenant = await api_keys.tenant(found.tenant)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Failure(500, "what is stored of this key cannot be read", code="server_error") from None
        if tenant is None:
            return None
        return Caller(found.tenant, name_of(digest), tenant, found.limits, found.expires, found.rights)

    def _tokens_if(self, key: str) -> Tokens | None:
        """Who knows this key, if it is a token."""
        return self._tokens if self._tokens is not None and self._tokens.is_one(key) else None

    async def _keys_exist(self) -> bool:
        if self._asks_for_keys:
            return True
        if time.monotonic() - self._looked_at > KNOWN_FOR_S:
            self._asks_for_keys = await api_keys.any_keys()
            self._looked_at = time.monotonic()
        return self._asks_for_keys


def _tokens() -> Tokens | None:
    """None: keys alone are known."""
    known = settings()
    if not known.gateway_jwks_url:
        return None
    try:
        from petiole.gateway.serving.auth.web_tokens import Tokens
    except ImportError:
        raise invalid("gateway_jwks_url", "must be empty without 'petiole[jwt]'", known.gateway_jwks_url) from None
    return Tokens(known)


callers = connections.PerLoop(KeyCache)
"""The running event loop's."""


def needing(right: str, handler: Handler) -> Handler:
    """The handler, for callers with this right: it is asked for before anything else is done. Without keys nobody
    has any right."""

    async def asked(request: Request) -> Response:
        if right not in caller().rights:
            told = f"this needs a key with the right {right}: see `petiole keys set --rights {right}`"
            raise Failure(403, told, code="missing_right")
        return await handler(request)

    return asked
