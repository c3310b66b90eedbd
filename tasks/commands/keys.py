"""`petiole keys`: the keys of the gateway. The gateway knows how they are kept, so a string names it."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from types import ModuleType

from petiole.tasks.commands.terminal import print_table
from petiole.tasks.errors import InvalidRequest, PetioleError

MANAGE = "petiole.gateway.serving.callers.manage"
A_MINUTE = ("requests", "input_tokens", "output_tokens")
LIMITS = (*A_MINUTE, "concurrent", "files", "file_bytes", "batches", "batch_rows")


def add_options(command: argparse.ArgumentParser) -> None:
    what = command.add_subparsers(required=True, metavar="WHAT")
    adding = what.add_parser("add", help="make a key for a tenant, and print it: it is shown once")
    adding.set_defaults(run=_add)
    adding.add_argument("tenant", help="who has the key; an unknown one is made")
    adding.add_argument("--models", metavar="NAMES", help="models and adapters it may ask for, such as chat,qwen*")
    adding.add_argument("--queue", help="the only queue for its tasks")
    adding.add_argument("--priority", type=int, help="the most urgent that it may ask for; 0 is first, 9 last")
    adding.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"of the tenant; a minute's {', '.join(A_MINUTE)}, or {', '.join(LIMITS[3:])}; 0: none",
    )
    adding.add_argument("--key-limit", action="append", default=[], metavar="NAME=N", help="of this key alone")
    adding.add_argument("--note", default="", help="what the key is for")
    adding.add_argument(
        "--print-settings", action="store_true", help="store nothing: print PETIOLE_GATEWAY_KEYS for this key"
    )
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


def _add(options: argparse.Namespace) -> int:
    manage = _manage()
    if options.print_settings:
        key, document = manage.document(options.tenant)
        print(f"{key}\nPETIOLE_GATEWAY_KEYS='{document}'")
        return 0
    named = {"queue": options.queue, "priority": options.priority}
    of_tenant = {name: value for name, value in named.items() if value is not None}
    if options.models is not None:
        of_tenant["models"] = [one.strip() for one in options.models.split(",") if one.strip()]
    print(manage.add(options.tenant, of_tenant, _limits(options.limit), _limits(options.key_limit), options.note))
    return 0


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
        rows.append((one.name, one.key.tenant, models, *limits, made, one.where, one.webhook, one.key.note))
    print_table(("key", "tenant", "models", "limits", "its own", "made", "in", "webhook", "note"), rows)
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
