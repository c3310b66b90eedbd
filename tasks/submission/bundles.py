"""Messages that are made from templates, on their way to Redis: those that wait together go together.

A submission is prepared as `delay` prepares it, in the caller's context. Only its message waits for those of the
others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError

from petiole.contract.settings.urls import redacted
from petiole.tasks.app.thread_executor import ProcessThreads, WaitingCall
from petiole.tasks.errors import Unavailable
from petiole.tasks.servers import sentinels
from petiole.tasks.servers.replies import is_damage

if TYPE_CHECKING:
    from petiole.tasks.app.application import App
    from petiole.tasks.app.redis_transport import Push


@contextmanager
def reaching_the_broker(app: App, *, breaker: bool = True) -> Iterator[None]:
    """A context in which the broker is reached, or `Unavailable` is raised. A broker that refuses a damaged queue
    is not away: the breaker stays closed."""
    try:
        with app.breaker.attempt() if breaker else nullcontext():
            try:
                yield
            except OperationalError as error:
                if is_damage(error.__cause__):
                    raise
                raise unavailable(app, error) from None
    except Unavailable:
        raise
    except OperationalError as error:
        raise unavailable(app, error) from None


def unavailable(app: App, error: Exception) -> Unavailable:
    url = str(app.conf.broker_url)
    return Unavailable(redacted(url), sentinels.why(error, url, app.conf.broker_transport_options))


class Bundles:
    """The messages of some submissions, one bundle for each app: mostly there is one app. `kept`: all of them, in
    the order of submission."""

    def __init__(self) -> None:
        self._of_apps: dict[App, list[Push]] = {}
        self.kept: list[Push] = []

    def keep(self, app: App, push: Push) -> None:
        self._of_apps.setdefault(app, []).append(push)
        self.kept.append(push)

    def send(self) -> None:
        """Send all. A message that is not sent has an `error` afterwards."""
        for app, pushes in self._of_apps.items():
            send(app, pushes)


def send(app: App, pushes: Sequence[Push]) -> None:
    """Send them. One that is not sent has an `error` afterwards."""

    def unsent() -> list[Push]:
        return [one for one in pushes if not (one.sent or one.error)]

    try:
        with reaching_the_broker(app), app.pools.connections.acquire(block=True) as connection:
            ensured(app, connection, lambda: connection.default_channel.push(unsent()))
    except Exception as error:
        for push in unsent():
            push.error = error
    for push in pushes:
        if push.error is not None and is_damage(push.error):
            push.error = unavailable(app, push.error)


def ensured(app: App, connection: Any, call: Callable[[], object]) -> None:
    """Raises `OperationalError` if the broker is away for longer than Celery tries."""
    connection.ensure(connection, call, **app.conf.task_publish_retry_policy)()


def submit(calls: Sequence[WaitingCall]) -> None:
    bundles, waiting = Bundles(), []
    for call in calls:
        before = len(bundles.kept)
        call.run(bundles)
        waiting += [(call, push) for push in bundles.kept[before:]]
    bundles.send()
    for call, push in waiting:
        call.error = call.error or push.error


SUBMISSIONS = ProcessThreads("submit", size=4, most=10_000, together=16, work=submit)
"""More threads would not submit faster, because they share the interpreter with the event loop."""
