"""`petiole keys`: the keys of the gateway. The gateway knows how they are kept, so a string names it."""

from __future__ import annotations

import argparse
import shlex
import time
from datetime import UTC, datetime
from importlib import import_module
from types import ModuleType
from typing import Any

from petiole.tasks.commands.terminal import print_table
from petiole.tasks.errors import InvalidRequest, PetioleError

MANAGE = "petiole.gateway.serving.auth.manage"
A_MINUTE = ("requests", "input_tokens", "output_tokens")
LIMITS = (*A_MINUTE, "concurrent", "files", "file_bytes", "batches", "batch_rows", "day_tokens", "month_tokens")


def add_options(command: argparse.ArgumentParser) -> None:
    what = command.add_subparsers(required=True, metavar="WHAT")
    adding = what.add_parser("add", help="make a key for a tenant, and print it: it is shown once")
    adding.set_defaults(run=_add)
    adding.add_argument("tenant", help="who has the key; an unknown one is made")
    _of_tenant(adding)
    adding.add_argument("--key-limit", action="append", default=[], metavar="NAME=N", help="of this key alone")
    _of_key(adding)
    adding.add_argument(
        "--print-settings", action="store_true", help="store nothing: print PETIOLE_GATEWAY_KEYS for this key"
    )
    setting = what.add_parser("set", help="change a tenant or a key; gateways know it some seconds later")
    setting.set_defaults(run=_set)
    setting.add_argument("name", help="a tenant, or else a key as `petiole keys list` shows it")
    _of_tenant(setting)
    _of_key(setting)
    setting.add_argument("--make", action="store_true", help="make the tenant, such as one that tokens will name")
    listing = what.add_parser("list", help="the keys by their names, and their tenants")
    listing.set_defaults(run=_list)
    revoking = what.add_parser("revoke", help="forget a key; it may be used for some seconds more")
    revoking.set_defaults(run=_revoke)
    revoking.add_argument("key", help="its name, as `petiole keys list` shows it, or the key itself")
    telling = what.add_parser("webhook", help="tell a tenant's server what has ended; prints a secret, once")
    telling.set_defaults(run=_webhook)
    telling.add_argument("tenant", help="whose; '' for everybody, where there are no keys")
    telling.add_argument("url", nargs="?", help="where it is told; again: with a new secret beside the last one")
    telling.add_argument("--remove", action="store_true", help="tell it no longer")


def _of_key(command: argparse.ArgumentParser) -> None:
    command.add_argument("--note", help="what the key is for")
    command.add_argument("--expires", metavar="TIME", help="such as 2027-01-31, in UTC; never")
    rights = "of the key: admin, to see and change the keys of all; adapters, to load and unload them; '': none"
    command.add_argument("--rights", metavar="NAMES", help=rights)


def _of_tenant(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--models", metavar="NAMES", help="models and adapters it may ask for, such as chat,qwen*"
    )
    command.add_argument("--queue", help="the only queue for its tasks")
    command.add_argument("--priority", type=int, help="the most urgent that it may ask for; 0 is first, 9 last")
    command.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"a minute's {', '.join(A_MINUTE)}, or {', '.join(LIMITS[3:])}; 0: none",
    )


def _add(options: argparse.Namespace) -> int:
    manage = _manage()
    limits = _limits(options.limit), _limits(options.key_limit)
    asked = options.tenant, _of_the_tenant(options), *limits, _of_the_key(options)
    if options.print_settings:
        key, document = manage.document(*asked)
        print(f"{key}\nPETIOLE_GATEWAY_KEYS={shlex.quote(document)}")
        return 0
    key, _ = manage.add(*asked)
    print(key)
    return 0


def _set(options: argparse.Namespace) -> int:
    changes, limits = _of_the_tenant(options) | _of_the_key(options), _limits(options.limit)
    if not changes and not limits and not options.make:
        raise InvalidRequest("changes", "must be at least one, such as --limit requests=60", "none")
    print(f"changed: {_manage().change(options.name, changes, limits, options.make)}")
    return 0


def _of_the_tenant(options: argparse.Namespace) -> dict[str, Any]:
    return _given(queue=options.queue, priority=options.priority, models=_names(options.models))


def _of_the_key(options: argparse.Namespace) -> dict[str, Any]:
    expires = None if options.expires is None else _time(options.expires)
    return _given(note=options.note, expires=expires, rights=_names(options.rights))


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _names(given: str | None) -> list[str] | None:
    return None if given is None else [one.strip() for one in given.split(",") if one.strip()]


def _time(given: str) -> int:
    """Unix seconds; 0: never. Raises `InvalidRequest`."""
    if given == "never":
        return 0
    try:
        found = datetime.fromisoformat(given)
        return max(1, int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError):
        raise InvalidRequest("expires", "must be an ISO time, such as 2027-01-31, or never", given) from None


def _limits(given: list[str]) -> dict[str, int]:
    found = {}
    for one in given:
        name, _, number = one.partition("=")
        if not number.isdecimal():
            raise InvalidRequest("limit", "must be NAME=N, such as requests=60", one)
        found[name] = int(number)
    return found


def _list(_: argparse.Namespace) -> int:
    rows = []
    for one in _manage().listed():
        made = time.strftime("%Y-%m-%d", time.gmtime(one.key.created)) if one.key.created else ""
        models = "all" if one.tenant.models is None else ",".join(one.tenant.models)
        limits = _shown(one.tenant.limits), _shown(one.key.limits)
        ends = min(filter(None, (one.key.expires, one.tenant.expires)), default=0)
        expires = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(ends)) if ends else ""
        rights = ",".join(one.key.rights)
        shown = (one.name, one.key.tenant, models, *limits, rights, made, expires, one.where)
        rows.append((*shown, one.webhook, one.key.note))
    head = ("key", "tenant", "models", "limits", "its own", "rights", "made", "expires", "in", "webhook", "note")
    print_table(head, rows)
    return 0


def _shown(limits: object) -> str:
    return ", ".join(f"{name} {value}" for name in LIMITS if (value := getattr(limits, name)) is not None)


def _revoke(options: argparse.Namespace) -> int:
    print(f"revoked: a key of {_manage().revoke(options.key)}")
    return 0


def _webhook(options: argparse.Namespace) -> int:
    if options.remove == (options.url is not None):
        raise InvalidRequest("url", "must be given, or --remove, and not both", options.url)
    if options.remove:
        found = _manage().no_webhook(options.tenant)
        print("removed" if found else f"tenant {options.tenant!r} has no webhook in Redis")
        return 0
    print(_manage().webhook(options.tenant, options.url))
    return 0


def _manage() -> ModuleType:
    try:
        return import_module(MANAGE)
    except ImportError as error:
        raise PetioleError(f"keys need 'petiole[gateway]': {error}") from None
