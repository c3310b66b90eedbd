"""Who asks. Each request has one *caller*: a tenant, by one of its keys. Without keys everybody is `ANYBODY`.

The caller is a context variable, so it reaches whatever a request touches without being handed on: records and
what is kept beside them lie under the tenant's name, the catalogue shows the models that the tenant may ask for,
and a submission gets the tenant's salt, queue and priority, by `options` and `submission`. A room that is written
tomorrow is separated, too."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import msgspec

from petiole import json_text
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import TENANT_HEADER

NOTHING: Mapping[str, Any] = {}
NAME = r"[A-Za-z0-9_-]{1,64}"
"""The form of a tenant's name."""

MOST = 10**15
"""The largest value of a limit."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What may be used in a minute, and how many requests may run at a time. `files`, `file_bytes`: of uploaded
    files that are kept. `batches`, `batch_rows`: of batches that have not ended, in all. `day_tokens`,
    `month_tokens`: a tenant's budgets of tokens in and out, in UTC. None: as much as there is."""

    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    concurrent: int | None = None
    files: int | None = None
    file_bytes: int | None = None
    batches: int | None = None
    batch_rows: int | None = None
    day_tokens: int | None = None
    month_tokens: int | None = None


ADMIN, ADAPTERS = "admin", "adapters"
RIGHTS = (ADMIN, ADAPTERS)
"""What not every key may do. `admin`: see, make and change all tenants and keys. `adapters`: load and unload
adapters."""

BUDGETS = ("day_tokens", "month_tokens")
"""Limits that the ledger's sums are compared with: it has them by tenant."""


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`salt`: a secret that keeps the tenant's prefixes in the cache apart. `queue`: the only queue for its tasks.
    `models`: patterns of the names, of models and adapters, that it may ask for; None: all. `priority`: the most
    urgent that it may ask for, 0 to 9, where 0 is first. `expires`: from when on, in Unix seconds, none of its
    keys is known; 0: never."""

    salt: str = ""
    queue: str | None = None
    models: Sequence[str] | None = None
    priority: int | None = None
    limits: Limits = Limits()
    expires: int = 0


class Key(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is known of a key. The key itself is known to nobody but its owner. `expires`: as a tenant's. `rights`:
    of `RIGHTS`."""

    tenant: str
    created: int = 0
    limits: Limits = Limits()
    note: str = ""
    expires: int = 0
    rights: Sequence[str] = ()


def problem(one: Tenant | Key) -> tuple[str, str, object] | None:
    """The field for which a tenant or a key cannot be used, the rule that it breaks, and its value.
    None: it can be used."""
    for name in Limits.__struct_fields__:
        value = getattr(one.limits, name)
        if value is not None and name in BUDGETS and isinstance(one, Key):
            return f"limits.{name}", "must be given for a tenant", value
        if value is not None and not 0 <= value <= MOST:
            return f"limits.{name}", f"must be from 0 to {MOST}", value
    if isinstance(one, Key):
        unknown = sorted(set(one.rights) - set(RIGHTS))
        return ("rights", f"must be of {', '.join(RIGHTS)}", unknown[0]) if unknown else None
    if one.priority is not None and not 0 <= one.priority <= 9:
        return "priority", "must be from 0 to 9", one.priority
    return None


class Caller(msgspec.Struct, frozen=True):
    """`name`: the tenant's; "" for everybody. `key`: the first digits of its key's hash, which name it; of a token
    its subject's."""

    name: str = ""
    key: str = ""
    tenant: Tenant = Tenant()
    key_limits: Limits = Limits()
    key_expires: int = 0
    rights: Sequence[str] = ()

    @property
    def expires(self) -> int:
        """From when on nobody is this caller, in Unix seconds; 0: never."""
        return min(filter(None, (self.tenant.expires, self.key_expires)), default=0)

    @property
    def of_both(self) -> tuple[Limits, Limits]:
        """The limits of the tenant and of the key."""
        return self.tenant.limits, self.key_limits

    def most(self, name: str) -> int | None:
        """The least of the limits of this name. 0 is none, as for a minute's."""
        return min(filter(None, (getattr(limits, name) for limits in self.of_both)), default=None)

    def may_ask(self, model: str) -> bool:
        patterns = self.tenant.models
        return patterns is None or any(fnmatch.fnmatchcase(model, pattern) for pattern in patterns)

    def place_of(self, name: str) -> str:
        """Where the tenant's values of this name are. No name leads to another tenant's."""
        return f"{self.name}/{name}" if self.name else name


@dataclass
class ClientRequest:
    """The HTTP request, as far as it may repeat another one. `retries`: how often its SDK has tried before; None:
    it does not say. `digest`: of its path and body. `sense`: of its path and of what its body says, in whatever
    order; with an `Idempotency-Key` alone. `name`: of the record that answers it. `submitting`: its client may
    leave, and it is submitted all the same."""

    path: str = ""
    idempotency_key: str = ""
    retries: int | None = None
    digest: str = ""
    sense: str = ""
    name: str = ""
    kind: str = ""
    submitting: bool = False

    @property
    def may_repeat(self) -> bool:
        return bool(self.idempotency_key) or self.retries is not None

    def has(self, body: bytes | bytearray) -> None:
        """This is its body."""
        if self.may_repeat:
            self.digest = self._digest_of(body)
        if self.idempotency_key:
            with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                self.sense = self._digest_of(msgspec.json.encode(json_text.decode(body), order="sorted"))

    def says(self, digest: str, sense: str) -> bool:
        """Whether these are another try's of the same. A body that is no JSON has no `sense`."""
        return digest == self.digest or (bool(sense) and sense == self.sense)

    def _digest_of(self, body: bytes | bytearray) -> str:
        digest = hashlib.sha256(self.path.encode(errors="surrogatepass") + b"\0")
        digest.update(body)
        return digest.hexdigest()


ANYBODY = Caller()

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
_request: ContextVar[ClientRequest | None] = ContextVar("request", default=None)
_told: ContextVar[dict[str, str] | None] = ContextVar("told", default=None)


def caller() -> Caller:
    """Who asks."""
    return _caller.get()


def request() -> ClientRequest | None:
    """The request in whose context this runs; None over a WebSocket."""
    return _request.get()


def tell(name: str, value: str) -> None:
    """Let the answer have this header, if it has not begun."""
    told = _told.get()
    if told is not None:
        told[name] = value


@contextmanager
def as_caller(who: Caller, made: ClientRequest | None = None) -> Iterator[dict[str, str]]:
    """In this context, and in tasks that begin in it, this caller asks. What is told it is in the result."""
    told: dict[str, str] = {}
    tokens = _caller.set(who), _told.set(told), _request.set(made)
    try:
        yield told
    finally:
        _caller.reset(tokens[0])
        _told.reset(tokens[1])
        _request.reset(tokens[2])


def options(asks: Caller, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a task. The tenant's salt and the client's own make one salt, which nobody else can name."""
    if not asks.tenant.salt:
        return dict(given)
    own = str(given.get("salt", ""))
    return {**given, "salt": hashlib.sha256(f"{asks.tenant.salt}\0{own}".encode()).hexdigest()}


def submission(asks: Caller, given: Mapping[str, Any], headers: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """The options of a submission, with these headers. No task of a tenant is more urgent than its priority."""
    if not asks.name:
        return dict(given)
    found = {**given, "headers": {**given.get("headers", {}), **headers, TENANT_HEADER: asks.name}}
    most = asks.tenant.priority
    if most is None:
        return found
    if scheme(settings().broker_url) in RABBITMQ:  # there 9 is first
        return {**found, "priority": min(9 - most, given.get("priority", 9))}
    return {**found, "priority": max(most, given.get("priority", 0))}
