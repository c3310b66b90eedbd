"""The queue for the next link of a chain, a callback or a chord's body that is a task of another app.

A task in this worker's registry belongs to Petiole's app, and goes to Petiole's queue. Any other task must be
another app's: in Petiole's queue it would be lost. Producers need not import all tasks, so nothing changes for
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery

Route = Callable[..., dict[str, str] | None]


def route_to(queue: str, app: Celery) -> Route:
    """A router for tasks that `app` lacks. Celery asks routers only if no queue is named."""

    def route(
        name: str, args: object, kwargs: object, options: dict[str, Any], **_: object
    ) -> dict[str, str] | None:
        named = options.keys() & {"queue", "exchange", "routing_key"}
        return None if named or name in app.tasks else {"queue": queue}

    return route


def add_route(app: Celery, queue: str) -> None:
    """Add the router, after the routes that a user has set."""
    routes = app.conf.task_routes or []
    app.conf.task_routes = [*(routes if isinstance(routes, list | tuple) else [routes]), route_to(queue, app)]
