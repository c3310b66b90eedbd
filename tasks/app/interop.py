"""Which app is the user's, and what it and Petiole's must have in common when one canvas has tasks of both.

A mistake would show late, as a task that nobody runs. So the check runs when such a canvas is submitted. If
Petiole's app submits the first task, a mistake raises an exception. If the user's app does, it is logged, because
Celery's signals cannot stop a submission.

A canvas is a tree: a step of a chain, or the body of a chord, may itself be a group, a chain or a chord. The check
looks at all tasks of the tree.

A group that has tasks of both is waited for in a way of its own: see `install`."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery import Celery, _state, current_app
from celery.result import ResultSet
from celery.signals import after_task_publish, before_task_publish, task_sent

from petiole.contract.settings.urls import is_whole, redacted
from petiole.tasks.app.result_consumer import nodes
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.wire.keys import EXCHANGE_TYPE, QUEUE_TYPE

logger = logging.getLogger(__name__)

_FAMILIES = {
    **dict.fromkeys(("redis", "rediss", "redis+socket", "unix", "sentinel"), "redis"),
    **dict.fromkeys(("amqp", "amqps", "pyamqp", "py-amqp", "librabbitmq"), "amqp"),
}
_PORTS = {"redis": 6379, "amqp": 5672}
_LINKS = ("chain", "link", "callbacks", "link_error", "errbacks")
_CELERYS_BROKER = "amqp://localhost//"  # without a setting
AT_LEAST_S = 0.001
"""Before Celery 5.7 a time limit of 0 is none."""

chord_of_both: Callable[[Celery, str | None], object] | None = None
"""Called with the user's app when its results and Petiole's are to meet in a chord, and with the queue of the
generations, if that is known. Set by `tasks.submission.task`."""

covered = False
"""Whether `petiole.testing` answers the tasks of Petiole's app."""

_reported: set[str] = set()
_own_receivers = 0
_sending = threading.local()


@contextmanager
def sent_by_petiole() -> Iterator[None]:
    """Messages that are published in this context belong to Petiole's app."""
    outer, _sending.ours = getattr(_sending, "ours", False), True
    try:
        yield
    finally:
        _sending.ours = outer


def check(ours: Celery, options: Mapping[str, Any]) -> None:
    """Raises `InvalidSettings` if a task of Petiole's app, submitted with `options`, leads to a task of another
    app that cannot be reached."""
    if not any(options.get(one) for one in (*_LINKS, "chord")):
        return
    links, chord = list(_links(options)), _list(options.get("chord"))
    is_chord = bool(chord) or any(map(_has_chord, links))
    for theirs in _apps([*links, *chord], ours):
        for problem in _different(ours, theirs, is_chord):
            raise InvalidSettings(problem)
        if is_chord and chord_of_both is not None:
            chord_of_both(theirs, options.get("queue"))
    for senders, sent in _sendings([], list(reversed(_list(options.get("chain")))), ours):
        for theirs in senders:
            for problem in _undeclared(theirs, sent):
                raise InvalidSettings(problem)


def tell_who_is_eager(ours: Celery) -> None:
    """Warn a test whose app is eager: Petiole's app is another one, and its tasks go to its broker."""
    theirs = users_app(ours)
    if covered or theirs is ours or (theirs is _state.default_app and theirs.main == "default"):
        return
    if theirs.conf.task_always_eager and not ours.conf.task_always_eager:
        where = redacted(_broker(ours))
        warnings.warn(
            f"task_always_eager of the app {theirs.main!r} does not cover Petiole's tasks: they go to {where}. In"
            " tests use petiole.testing (docs/testing.md), or set task_always_eager of petiole.celery_app, too.",
            RuntimeWarning,
            stacklevel=2,
        )


def watch(ours: Celery, names: Container[str]) -> None:
    """Log mistakes in messages of another app that lead to generations. `names`: the names of these tasks."""

    def look_at_links(body: Any = None, properties: Any = None, **_: object) -> None:
        if getattr(_sending, "ours", False) or not isinstance(body, tuple) or len(body) != 3:
            return
        links = list(_links(body[2]))
        chord = [one for one in _list(body[2].get("chord")) if isinstance(one, dict)]
        found = [one for one in _tasks([*links, *chord]) if one.get("task") in names]
        theirs = _sender((properties or {}).get("reply_to"), ours) or users_app(ours)
        if found and theirs is not ours:
            is_chord = bool(chord) or any(map(_has_chord, links))
            for problem in [*_different(ours, theirs, is_chord), *_undeclared(theirs, _queues(*found))]:
                if problem not in _reported:
                    _reported.add(problem)
                    logger.error("a generation of this chain or chord will not run: %s", problem)
            if is_chord and chord_of_both is not None:
                chord_of_both(theirs, next(iter(_queues(*found)), None))

    global _own_receivers
    before_task_publish.connect(look_at_links, weak=False)
    _own_receivers += 1


def others_listen() -> bool:
    """Whether somebody is told of each message that Petiole's app sends: by Celery's signals, or because
    `petiole.testing` answers it."""
    heard = before_task_publish.receivers, after_task_publish.receivers, task_sent.receivers
    return covered or sum(len(receivers or ()) for receivers in heard) > _own_receivers


def users_app(ours: Celery) -> Celery:
    """The app that this thread works for. Celery knows it in the thread that has made it, and in workers. In the
    other threads of a web server it is the one app beside Petiole's, if there is one."""
    current: Celery = current_app._get_current_object()
    if current is ours or (current is _state.default_app and current.main == "default"):  # Celery's last resort
        others = [app for app in _active_apps() if app is not ours and app is not current]
        return others[0] if len(others) == 1 else current
    return current


def elsewhere(ours: Celery, reply_to: object) -> Celery | None:
    """The app of a message with this `reply_to`, if it is not Petiole's and perhaps has another broker, or other
    names of lists in it."""
    theirs = None if getattr(_sending, "ours", False) else _sender(reply_to, ours)
    return theirs if theirs is not None and _lists(ours) != _lists(theirs) else None


def _sender(reply_to: object, ours: Celery) -> Celery | None:
    """The other app that has made a message in this thread: each app has an id of its own for each thread."""
    if reply_to is None:
        return None
    return next((app for app in _active_apps() if app is not ours and app.thread_oid == reply_to), None)


def _active_apps() -> list[Celery]:
    return list(_state._get_active_apps())


# ------------------------------------------------------------ the tree of a canvas


def _members(signature: Any) -> list[list[Any]]:
    """The signatures inside a group, a chain or a chord: those that are sent together, in the order of
    sending."""
    inside = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case "chain":
            return [[step] for step in _list(inside.get("tasks"))]
        case "group":
            return [_list(inside.get("tasks"))]
        case "chord":
            header = inside.get("header")
            return [[header] if isinstance(header, dict) else _list(header), _list(inside.get("body"))]
    return []


def _tasks(signatures: Iterable[Any]) -> Iterator[Any]:
    """The tasks in these signatures."""
    for signature in signatures:
        if isinstance(signature, dict):
            members = _members(signature)
            yield from (task for sent in members for task in _tasks(sent)) if members else [signature]


def _has_chord(signature: Any) -> bool:
    inside = (one for sent in _members(signature) for one in sent if isinstance(one, dict))
    return signature.get("subtask_type") == "chord" or any(map(_has_chord, inside))


def _apps(signatures: Iterable[Any], ours: Celery) -> list[Celery]:
    """The other apps of the tasks in these signatures."""
    return [theirs for task in _tasks(signatures) if (theirs := _another_app(task, ours)) is not None]


def _sendings(
    senders: list[Celery], steps: Iterable[Any], ours: Celery
) -> Iterator[tuple[list[Celery], set[str]]]:
    """For each step that has tasks of Petiole's app: the other apps whose workers send the step, and the queues of
    those tasks."""
    for step in steps:
        if not isinstance(step, dict):
            continue
        members = _members(step)
        if not members:
            if _another_app(step, ours) is None:
                yield senders, _queues(step)
            senders = _apps([step], ours)
        before = senders
        for sent in members:
            for one in sent:
                yield from _sendings(before, [one], ours)
            before = senders = _apps(sent, ours)


def _another_app(signature: Any, ours: Celery) -> Celery | None:
    """The app of a task, unless it is Petiole's. Celery gives a signature the app of the canvas that it is in, so
    the task itself knows better."""
    app = getattr(getattr(signature, "_type", None), "app", None) or getattr(signature, "_app", None)
    return app if isinstance(app, Celery) and app is not ours else None


def _queues(*signatures: Any) -> set[str]:
    """The queues that the signatures name."""
    options = [one.get("options") or {} for one in signatures if isinstance(one, dict)]
    return {str(given["queue"]) for given in options if given.get("queue")}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


def _links(options: Mapping[str, Any]) -> Iterator[Any]:
    for name in _LINKS:
        yield from (one for one in _list(options.get(name)) if isinstance(one, dict))


def _different(ours: Celery, theirs: Celery, is_chord: bool) -> Iterator[str]:
    brokers = _broker(ours), _broker(theirs)
    if _elsewhere(*brokers):
        yield (
            f"PETIOLE_BROKER_URL: must be the broker of the app {theirs.main!r}, {redacted(brokers[1])}, whose"
            f" tasks are in one chain or chord with a generation, got {redacted(brokers[0])}"
        )
    backends = str(ours.conf.result_backend), str(theirs.conf.result_backend or "disabled://")
    if is_chord and _elsewhere(*backends):
        yield (
            f"PETIOLE_RESULT_BACKEND: must be the result backend of the app {theirs.main!r}, whose tasks are in"
            f" one chord with a generation, {redacted(backends[1])}, got {redacted(backends[0])}"
        )
    named = {"broker_transport_options": brokers} | (
        {"result_backend_transport_options": backends} if is_chord else {}
    )
    for name, urls in named.items():
        prefix, other = (_option(app, name, "global_keyprefix") or "" for app in (ours, theirs))
        if prefix != other and all(_place(url)[0] == "redis" for url in urls if is_whole(url)):
            yield (
                f"global_keyprefix of {name}: must be that of the app {theirs.main!r}, {other!r}, whose tasks are"
                f" in one chain or chord with a generation, got {prefix!r}"
            )


def _option(app: Celery, transport: str, name: str) -> Any:
    return (app.conf.get(transport) or {}).get(name)


def _broker(app: Celery) -> str:
    url = app.conf.broker_write_url or _CELERYS_BROKER
    return str(url[0] if isinstance(url, list | tuple) else url).partition(";")[0]


def _elsewhere(one: str, other: str) -> bool:
    """Whether two URLs certainly name different places. Two host names may mean the same server."""
    if not (is_whole(one) and is_whole(other)):
        return False
    (family, host, *rest), (other_family, other_host, *other_rest) = _place(one), _place(other)
    return family != other_family or (host == other_host and rest != other_rest)


def _place(url: str) -> tuple[str, str, int | None, str]:
    parts = urlsplit(url)
    family = _FAMILIES.get(parts.scheme, parts.scheme)
    if parts.scheme in {"redis+socket", "unix"}:
        query = parse_qs(parts.query)
        database = (query.get("virtual_host") or query.get("db") or ["0"])[0].strip("/")
        return family, parts.netloc + parts.path, None, database or "0"
    host = {"localhost": "127.0.0.1", "": "127.0.0.1", "::1": "127.0.0.1"}.get(*[parts.hostname or ""] * 2)
    where = parts.path.lstrip("/") or ("0" if family == "redis" else "/")
    return family, host, parts.port or _PORTS.get(family), where


def _lists(app: Celery) -> list[object]:
    """What decides which list of which Redis a queue is."""
    options = [
        _option(app, "broker_transport_options", name) for name in ("global_keyprefix", "sep", "priority_steps")
    ]
    return [_place(_broker(app)), *options]


def _undeclared(theirs: Celery, queues: Iterable[str]) -> Iterator[str]:
    """Why `theirs` cannot declare Petiole's queues; empty if it can."""
    conf = theirs.conf
    for name in sorted(set(queues).difference((conf.task_queues and theirs.amqp.queues) or ())):
        if not conf.task_create_missing_queues:
            yield (
                f"task_create_missing_queues of the app {theirs.main!r}: must be True, or task_queues must have"
                f" {name!r}, where generations go, got False"
            )
        elif _place(_broker(theirs))[0] == "amqp" and (
            conf.get("task_create_missing_queue_type"),
            conf.get("task_create_missing_queue_exchange_type"),
        ) != (QUEUE_TYPE, EXCHANGE_TYPE):
            yield (
                f"task_create_missing_queue_type of the app {theirs.main!r}: must be {QUEUE_TYPE!r}, and"
                f" task_create_missing_queue_exchange_type {EXCHANGE_TYPE!r} (Celery 5.6 and later), or"
                f" task_queues must have {name!r} as Petiole's workers declare it, got"
                f" {conf.get('task_create_missing_queue_type')!r}"
            )


def install(ours: type[Celery]) -> None:
    """Replace the method of Celery's `ResultSet` that waits, for groups with results of several apps, one of them
    of the type `ours`. Each result of such a group is waited for by its own backend.

    Celery has the backend of one of the apps wait for all results. It is not told of the other app's results:
    `get()` returned None in their place, or waited for ever. The app of the group counts, too: Celery gives a
    group the app of the canvas that it is in."""
    stock = ResultSet.iter_native

    def is_mixed(results: ResultSet) -> bool:
        apps = [one.app for one in [results, *nodes(results)]]
        return any(isinstance(app, ours) for app in apps) and any(app is not apps[0] for app in apps)

    @functools.wraps(stock)
    def iter_native(self: ResultSet, timeout: float | None = None, *more: Any, **options: Any) -> Any:
        return (_each if is_mixed(self) else stock)(self, timeout, *more, **options)

    ResultSet.iter_native = iter_native


def _each(results: ResultSet, timeout: float | None, *more: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """What `iter_native` gives: the id of each result, and what is stored, or the members of a group."""
    give_up_at = None if timeout is None else time.monotonic() + timeout
    options |= dict(zip(("interval", "no_ack", "on_message", "on_interval"), more, strict=False))
    for one in results:
        left_s = None if give_up_at is None else max(AT_LEAST_S, give_up_at - time.monotonic())
        one.get(timeout=left_s, propagate=False, disable_sync_subtasks=False, **options)
        yield one.id, one.children if isinstance(one, ResultSet) else one._get_task_meta()
