"""`generate.s(...)`: a signature that carries its queue, for workers of another app that send it on.

The worker of the previous task sends the next link of a chain, a callback, and the body of a chord. A worker of
the user's own app does not know Petiole's queues, and would send the task to its own queue.

These decide the queue; the first match wins:

    1. `.set(queue=...)`
    2. a route for the task in the user's app, by the task's own name or by a function; a pattern, such as
       `tasks.*`, does not count
    3. the rules of Petiole's app: its `task_routes`, the tenant's queue, the default queue

`.s()` considers only 3, and there only the settings in the environment, because it may run while a module is
imported: then nothing may connect, and no setting is validated. Submitting a canvas freezes its signatures, and
considers all three. If Petiole's own app submits the canvas, its router decides, as it does without a
signature."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from celery import Celery
from celery.app.routes import MapRoute
from celery.canvas import Signature
from celery.utils.functional import maybe_evaluate
from kombu.entity import Queue

from petiole.contract.requests.generation import in_json
from petiole.tasks.app import interop
from petiole.tasks.app.application import App
from petiole.tasks.settings import PREFIX, Settings, parse_weights
from petiole.tasks.submission.options import choose_model
from petiole.tasks.wire.headers import TENANT


class OwnQueue(str):
    """The name of the queue that a signature has chosen itself. In JSON it is a plain string."""


def sign(task: Any, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> GenerationSignature:
    """The signature of a task, which is given as the task or its name. The app is one of the `options`."""
    return GenerationSignature(task, args, in_json(kwargs or {}), *more, **options)


class GenerationSignature(Signature):  # type: ignore[misc]
    """The signature of a task of Petiole's app.

    Celery gives a signature the app of the chain, group or chord that it is in. This one keeps its own."""

    _petioles: App

    @property
    def _app(self) -> App:
        return self._petioles

    @_app.setter
    def _app(self, app: Celery) -> None:
        if isinstance(app, App):
            self._petioles = app

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._carry(_in_the_environment)

    def set(self, immutable: bool | None = None, **options: Any) -> Self:
        super().set(immutable, **options)
        self._carry(_in_the_environment)
        return self

    def clone(self, args: Any = None, kwargs: Any = None, **options: Any) -> GenerationSignature:
        plain = super().clone(args, kwargs, **options)
        copy = GenerationSignature(plain, app=self._app)
        copy._type = plain._type
        return copy

    partial = clone

    def freeze(self, *args: Any, **options: Any) -> Any:
        if "model" in self.options:
            if isinstance(self.options.get("queue"), OwnQueue):
                del self.options["queue"]
            self["kwargs"] = dict(choose_model(self._app, self.kwargs, self.options))
        self._carry(_routed)
        result = super().freeze(*args, **options)
        result.submitted_to = self.options.get("queue")
        return result

    _freeze = freeze

    def _carry(self, choose: Any) -> None:
        """Set the queue, unless somebody else has set a queue or an exchange."""
        options = self.options
        if isinstance(options.get("queue"), OwnQueue | None) and not options.keys() & {"exchange", "routing_key"}:
            chosen = choose(self._app, self.task, self.args, self.kwargs, options)
            if chosen is None:
                options.pop("queue", None)
            else:
                options["queue"] = OwnQueue(chosen)


def _in_the_environment(app: App, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> str:
    if app.is_configured:
        queue = str(app.conf.task_default_queue)
    else:
        queue = os.environ.get(f"{PREFIX}QUEUE") or str(Settings.model_fields["queue"].default)
    tenant = TENANT.of(options.get("headers") or {})
    try:
        weights = parse_weights(os.environ.get(f"{PREFIX}TENANT_WEIGHTS", ""))
    except ValueError:  # the code that needs the setting reports it
        weights = {}
    return f"{queue}.{tenant}" if tenant in weights else queue


def _routed(app: App, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> str | None:
    """The queue; None if a route names an exchange instead."""
    others = interop.users_app(app)
    unset = {option: value for option, value in options.items() if option != "queue"}
    if others is not app and (route := _meant_for(others, name, args, kwargs, unset)) is not None:
        return _queue_of(route)
    route = app.amqp.router.lookup_route(name, args, kwargs, unset) if app.amqp.router.routes else None
    return str(app.conf.task_default_queue) if route is None else _queue_of(route)


def _meant_for(app: Celery, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
    """The route of this task in `app`, or None."""
    for router in map(maybe_evaluate, app.amqp.router.routes):
        if isinstance(router, MapRoute):
            route = router.map.get(name)
        elif hasattr(router, "route_for_task"):
            route = router.route_for_task(name, args, kwargs)
        else:
            route = router(name, args, kwargs, dict(options), task=None)
        if route is not None:
            return route
    return None


def _queue_of(route: Any) -> str | None:
    if isinstance(route, str):
        return route
    queue = dict(route).get("queue")
    return queue.name if isinstance(queue, Queue) else queue
