"""What is shown of keys and tenants, and what may be changed of them over HTTP. Pure.

A key is shown by its name, never itself; a tenant without its salt."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints

from petiole.contract.requests.bounds import Bounded, Entries
from petiole.gateway.core.caller import NAME, Caller, Key, Limits, Tenant

LATEST = 253_402_300_799
"""The last second of the year 9999."""
_LONGEST_NOTE = 256


def _null_is(value: object) -> BeforeValidator:
    """What null says."""
    return BeforeValidator(lambda given: value if given is None else given)


_Words = Annotated[list[Annotated[str, StringConstraints(max_length=256)]], Entries(64)]
_LIMITS = Limits.__struct_fields__
_Limits = Annotated[dict[str, int | None], Entries(len(_LIMITS)), _null_is(dict.fromkeys(_LIMITS))]


class Change(Bounded):
    """Base of changes. What is not named stays; null takes away. `expires_at`: in Unix seconds. `limits`: by name;
    0 takes one away, too."""

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True)

    expires_at: Annotated[int, Field(ge=0, le=LATEST)] | None = None
    limits: _Limits = Field(default_factory=dict)

    @property
    def changed_limits(self) -> dict[str, int]:
        return {name: value or 0 for name, value in self.limits.items()}

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of a `Key` or a `Tenant` that change, with their new values."""
        found = {name: getattr(self, name) for name in self.model_fields_set - {"limits", "expires_at", "tenant"}}
        return found | ({"expires": self.expires_at or 0} if "expires_at" in self.model_fields_set else {})


class ChangeKey(Change):
    note: Annotated[str, StringConstraints(max_length=_LONGEST_NOTE), _null_is("")] = ""
    rights: Annotated[_Words, _null_is([])] = Field(default_factory=list)


class CreateKey(ChangeKey):
    tenant: str = Field(pattern=f"^{NAME}$")


class ChangeTenant(Change):
    """`models`: null: all. `queue`, `priority`: null: any."""

    models: _Words | None = None
    queue: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    priority: int | None = None


def shown_key(name: str, key: Key, where: str) -> dict[str, Any]:
    """`where`: "redis", or "settings", where it cannot be changed."""
    return {
        "object": "key",
        "id": name,
        "tenant": key.tenant,
        "note": key.note,
        "rights": [*key.rights],
        "limits": limits_of(key.limits),
        "created_at": key.created or None,
        "expires_at": key.expires or None,
        "source": where,
    }


def shown_tenant(name: str, tenant: Tenant, where: str, day_tokens: int, month_tokens: int) -> dict[str, Any]:
    """`day_tokens`, `month_tokens`: what it has used."""
    return {
        "object": "tenant",
        "id": name,
        "models": None if tenant.models is None else [*tenant.models],
        "queue": tenant.queue,
        "priority": tenant.priority,
        "limits": limits_of(tenant.limits),
        "expires_at": tenant.expires or None,
        "usage": {"day_tokens": day_tokens, "month_tokens": month_tokens},
        "source": where,
    }


def shown_caller(asks: Caller) -> dict[str, Any]:
    """What a key may know of itself."""
    return {
        "object": "key",
        "id": asks.key or None,
        "tenant": asks.name or None,
        "rights": [*asks.rights],
        "limits": limits_of(asks.key_limits),
        "tenant_limits": limits_of(asks.tenant.limits),
        "expires_at": asks.expires or None,
    }


def limits_of(limits: Limits) -> dict[str, int]:
    found = {name: getattr(limits, name) for name in Limits.__struct_fields__}
    return {name: value for name, value in found.items() if value is not None}
