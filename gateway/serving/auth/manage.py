"""Keys in Redis, made, changed, listed and revoked: for `petiole keys`, and over HTTP. A key is shown once, when
it is made."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import structs

from petiole.contract.settings.urls import redacted
from petiole.gateway.core import caller, webhook_events
from petiole.gateway.core.caller import NAME, Key, Limits, Tenant
from petiole.gateway.core.webhook_events import Webhook, new_secret
from petiole.gateway.serving.auth.api_keys import (
    KEYS,
    TENANTS,
    WEBHOOKS,
    digest_of,
    name_of,
    new,
    new_tenant,
    of_settings,
)
from petiole.tasks.errors import InvalidRequest, PetioleError, Unavailable
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings

T = TypeVar("T", Key, Tenant)

NOTHING: Mapping[str, Any] = MappingProxyType({})


class ListedKey(NamedTuple):
    """A key as it is listed. `where`: "redis" or "settings". `webhook`: the URL of its tenant's."""

    name: str
    key: Key
    tenant: Tenant
    where: str
    webhook: str = ""


def any_keys() -> bool:
    """Whether any key exists. Raises `Unavailable` if Redis does not say."""
    if of_settings().keys:
        return True
    try:
        return bool(connections.streams().exists(KEYS))
    except connections.LOST as error:
        raise Unavailable(redacted(settings().streams_url), str(error)) from None


def add(
    tenant: str,
    of_tenant: Mapping[str, Any],
    limits: Mapping[str, int],
    key_limits: Mapping[str, int],
    of_key: Mapping[str, Any] = NOTHING,
) -> tuple[str, Key]:
    """A new key of this tenant, which is made or changed as `of_tenant` and `limits` say: what they do not name
    stays. `of_key`: the key's note, expiry and rights. Returns the key, and what is stored of it. Raises
    `InvalidRequest`."""
    of_limits = _limits(limits)
    key, made = _new_key(tenant, key_limits, of_key)

    def both(pipe: Any) -> None:
        stored = pipe.hget(TENANTS, tenant)
        before = _decoded(stored, Tenant) if stored is not None else new_tenant()
        pipe.multi()
        pipe.hset(TENANTS, tenant, msgspec.json.encode(_replaced(before, of_tenant, of_limits)))
        pipe.hset(KEYS, digest_of(key), msgspec.json.encode(made))

    connections.streams().transaction(both, TENANTS)
    return key, made


def _new_key(tenant: str, limits: Mapping[str, int], of_key: Mapping[str, Any]) -> tuple[str, Key]:
    _checked_name(tenant)
    key = Key(tenant, created=int(time.time()))
    return new(), _replaced(key, of_key, _limits(limits))


def _replaced(before: T, changes: Mapping[str, Any], limits: Mapping[str, int | None]) -> T:
    """A tenant or a key after these changes. Raises `InvalidRequest`."""
    after = structs.replace(before, limits=structs.replace(before.limits, **limits), **changes)
    if found := caller.problem(after):
        raise InvalidRequest(*found)
    return after


def change(name: str, changes: Mapping[str, Any], limits: Mapping[str, int], make: bool = False) -> str:
    """Change the tenant of this name, or else the key that `revoke` would forget. What is not named stays. `make`:
    it is a tenant, and made if there is none. Returns what was changed, in words. Raises `InvalidRequest`."""
    if make or connections.streams().hget(TENANTS, name) is not None:
        change_tenant(name, changes, limits, make)
        return f"tenant {name}"
    digest = _key_of(name, ", or that of a tenant: --make makes one")
    _change(KEYS, digest, Key, changes, limits)
    return f"key {name_of(digest)}"


def change_tenant(name: str, changes: Mapping[str, Any], limits: Mapping[str, int], make: bool = False) -> Tenant:
    """Returns what it is then. `make`: a tenant that is unknown is made, such as one that tokens will name. Raises
    `InvalidRequest`."""
    _checked_name(name)
    return _change(TENANTS, name, Tenant, changes, limits, new_tenant() if make else None)


def change_key(name: str, changes: Mapping[str, Any], limits: Mapping[str, int]) -> Key:
    """Returns what it is then. Raises `InvalidRequest`. A key that is revoked meanwhile stays revoked."""
    return _change(KEYS, _key_of(name), Key, changes, limits)


def _change(
    hash_key: str,
    field: str,
    kind: type[T],
    changes: Mapping[str, Any],
    limits: Mapping[str, int],
    unknown: T | None = None,
) -> T:
    """`unknown`: what is changed if nothing is stored."""
    if wrong := sorted(set(changes) - set(kind.__struct_fields__)):
        limit = "must be given for a key" if kind is Tenant else "must be given for a tenant"
        raise InvalidRequest(wrong[0], limit, changes[wrong[0]])
    changed_limits = _limits(limits)

    def replaced(pipe: Any) -> Any:
        stored = pipe.hget(hash_key, field)
        before = unknown if stored is None else _decoded(stored, kind)
        if before is None:
            raise InvalidRequest("name", "must be a tenant or a key in Redis", field[:64])
        after = _replaced(before, changes, changed_limits)
        pipe.multi()
        pipe.hset(hash_key, field, msgspec.json.encode(after))
        return after

    return cast(T, connections.streams().transaction(replaced, hash_key, value_from_callable=True))


def document(
    tenant: str,
    of_tenant: Mapping[str, Any],
    limits: Mapping[str, int],
    key_limits: Mapping[str, int],
    of_key: Mapping[str, Any],
) -> tuple[str, str]:
    """As `add`, but nothing is stored. Returns the key, and the JSON for `PETIOLE_GATEWAY_KEYS` that knows it."""
    key, made = _new_key(tenant, key_limits, of_key)
    tenants = {tenant: _replaced(new_tenant(), of_tenant, _limits(limits))}
    return key, msgspec.json.encode({"tenants": tenants, "keys": {digest_of(key): made}}).decode()


def stored_tenants() -> dict[str, Tenant]:
    """The tenants in Redis, by name."""
    return _stored(TENANTS, Tenant)


def listed() -> list[ListedKey]:
    own = of_settings()
    tenants, keys, stored = stored_tenants() | own.tenants, _stored(KEYS, Key), _stored(WEBHOOKS, Webhook)
    urls = {name: webhook.url for name, webhook in {**stored, **own.webhooks}.items()}
    of_both = [
        *((digest, key, "settings") for digest, key in own.keys.items()),
        *((digest, key, "redis") for digest, key in keys.items()),
    ]
    found = [
        ListedKey(name_of(digest), key, tenants.get(key.tenant, Tenant()), where, urls.get(key.tenant, ""))
        for digest, key, where in of_both
    ]
    return sorted(found, key=lambda known: (known.key.tenant, known.key.created))


def revoke(name: str) -> str:
    """Forget the key of this name, or the key itself. Returns its tenant. Raises `InvalidRequest`."""
    client, digest = connections.streams(), _key_of(name)
    stored = client.hget(KEYS, digest)
    client.hdel(KEYS, digest)
    tenant: str = "" if stored is None else _decoded(stored, Key).tenant
    return tenant


def webhook(tenant: str, url: str) -> str:
    """Where the tenant's notices go from now on. Returns a new secret. The one before it signs, too, until the
    next. Raises `InvalidRequest`."""
    secret = new_secret()

    def with_secret(pipe: Any) -> None:
        if tenant and pipe.hget(TENANTS, tenant) is None:
            raise InvalidRequest("tenant", "must be one that has keys in Redis", tenant)
        stored = pipe.hget(WEBHOOKS, tenant)
        before = () if stored is None else _decoded(stored, Webhook).secrets
        made = Webhook(url, [secret, *before[:1]])
        if (found := webhook_events.problem(made)) is not None:
            raise InvalidRequest(*found, url)
        pipe.multi()
        pipe.hset(WEBHOOKS, tenant, msgspec.json.encode(made))

    connections.streams().transaction(with_secret, TENANTS, WEBHOOKS)
    return secret


def no_webhook(tenant: str) -> bool:
    """The tenant's notices go nowhere from now on. Returns whether it had a webhook."""
    return bool(connections.streams().hdel(WEBHOOKS, tenant))


def _key_of(name: str, otherwise: str = "") -> str:
    """The SHA-256 of the key of this name, or of the key itself. `otherwise`: what it may be, too. Raises
    `InvalidRequest`."""
    whole = digest_of(name)
    known = map(_text, connections.streams().hkeys(KEYS))
    found = [one for one in known if one == whole or (len(name) >= 4 and one.startswith(name))]
    if len(found) != 1:
        limit = f"must be the name of one key in Redis, as `petiole keys list` shows it{otherwise}"
        raise InvalidRequest("key", limit, f"{len(found)} of that name")
    return found[0]


def _checked_name(tenant: str) -> None:
    if not re.fullmatch(NAME, tenant):
        raise InvalidRequest("tenant", f"must be a name of the form {NAME}", tenant)


def _limits(given: Mapping[str, int]) -> dict[str, int | None]:
    """0 takes a limit away."""
    for name in given:
        if name not in Limits.__struct_fields__:
            raise InvalidRequest("limits", f"must be one of {', '.join(Limits.__struct_fields__)}", name)
    return {name: value or None for name, value in given.items()}


def _text(raw: bytes | str) -> str:
    return raw.decode() if isinstance(raw, bytes) else raw


def _stored(hash_key: str, kind: type[Any]) -> dict[str, Any]:
    return {_text(name): _decoded(raw, kind) for name, raw in connections.streams().hgetall(hash_key).items()}


def _decoded(raw: bytes | str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise PetioleError(f"what is stored of a {kind.__name__.lower()} cannot be read: {error}") from None
