"""Submissions of an event loop: those that wait together go to Redis together.

A submission is prepared as `delay` prepares it, in the caller's context. Only its message waits for those of the
others. RabbitMQ has no round trips to share: there each message is sent at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from kombu.exceptions import OperationalError

from petiole.tasks.app.blocking import ProcessThreads, WaitingCall
from petiole.tasks.app.sending import KeptMessage, Together
from petiole.tasks.errors import Unavailable
from petiole.tasks.servers import sentinels
from petiole.tasks.servers.answers import is_damage
from petiole.tasks.urls import RABBITMQ, redacted, scheme

if TYPE_CHECKING:
    from petiole.tasks.app.application import App


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
    """The messages of some submissions, one bundle for each app: mostly there is one app."""

    def __init__(self) -> None:
        self._of_apps: dict[App, Together] = {}
        self._producers = ExitStack()

    def producer(self, app: App) -> dict[str, Any]:
        """Celery's option for a submission of this app, so that its message waits for the others."""
        if app not in self._of_apps:
            if scheme(app.conf.broker_url) in RABBITMQ or app.conf.task_always_eager:
                return {}
            producer = self._producers.enter_context(app.pools.producers.acquire(block=True))
            self._of_apps[app] = Together(app, producer)
        return {"producer": self._of_apps[app]}

    @property
    def kept(self) -> list[KeptMessage]:
        return [message for together in self._of_apps.values() for message in together.kept]

    def send(self) -> None:
        """Send all. A message that is not sent has an `error` afterwards."""
        with self._producers:
            for app, together in self._of_apps.items():
                try:
                    with reaching_the_broker(app):
                        together.send()
                except Exception as error:
                    for message in together.kept:
                        if not message.sent:
                            message.error = message.error or error
                for message in together.kept:
                    if message.error is not None and is_damage(message.error):
                        message.error = unavailable(app, message.error)


def submit(calls: Sequence[WaitingCall]) -> None:
    bundles, waiting = Bundles(), []
    for call in calls:
        before = len(bundles.kept)
        call.run(bundles)
        waiting += [(call, message) for message in bundles.kept[before:]]
    bundles.send()
    for call, message in waiting:
        call.error = call.error or message.error


SUBMISSIONS = ProcessThreads("submit", size=4, most=10_000, together=16, work=submit)
"""More threads would not submit faster, because they share the interpreter with the event loop."""
