"""What follows the end of a task happens once, however often a connection is lost before or after any command.

A completion talks to the result backend and to the broker, mostly through code of Celery's, and it is tried until
no command is refused. Celery's code would take a lost connection for a failure of the task, or of its chord. It
would also send the same links under new ids. So a try has four rules, which hold for every command and every
message, whoever sends it:

1. *A refusal ends the try.* `ServerUnavailable` is not an `Exception`, so no handler of Celery's takes it for an
   outcome.
2. *Nothing follows a refusal.* Every further command of the try is refused without being sent: some `finally`
   clauses of Celery's send commands.
3. *Each try sends the same messages.* Random ids follow from the task, so a link has one id, whichever worker
   sends it.
4. *A message is put once.* On Redis one script puts the message and notes it (`put.lua`). On RabbitMQ, which has
   no scripts, this process remembers what RabbitMQ has confirmed. If the confirmation is lost, the message may
   come twice, with the same id.

Storing a result, and counting a task in its chord (`count.lua`), have the same effect when they are done again.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from uuid import UUID, uuid4

from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid
from redis.exceptions import NoScriptError

from petiole.tasks.app.backend import refuses

ONE_RETRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}
"""Finds a pooled connection that was closed while it was idle. No thread waits for a broker that is away."""

_here = threading.local()


class ServerUnavailable(BaseException):
    """A server does not answer a command, or refuses it now, and may take it later."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class IdempotentCompletion:
    """All tries of one completion, which `name` identifies on every worker.

    `scope`: in which set Redis notes the messages. Two tasks of a chord share the chord's set for its body.
    """

    def __init__(self, name: str) -> None:
        self.name = self.scope = name
        self.token = uuid4().hex
        """Which completion holds a claim: another worker's has the same name."""
        self.message: str | None = None
        """Identifies the message that is being put."""
        self._refusal: Exception | None = None
        self._sent: set[str] = set()
        self._named: Counter[str] = Counter()
        self._ids = random.Random()

    @contextmanager
    def trying(self, step: str = "") -> Iterator[None]:
        """One try of a step, on this thread."""
        outer, _here.once = trial(), self
        self._refusal, self.scope, self.message = None, self.name, None
        self._ids.seed(f"{self.name} {step}")
        self._named.clear()
        try:
            yield
        finally:
            _here.once = outer

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        outer, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = outer

    def new_id(self) -> UUID:
        """The next random id. While a message is put it is truly random: kombu takes one for each attempt."""
        return uuid4() if self.message else UUID(int=self._ids.getrandbits(128), version=4)

    def refuse(self, reason: Exception) -> ServerUnavailable:
        """End the try."""
        self._refusal = reason
        return ServerUnavailable(reason)

    @contextmanager
    def guarded(self, kinds: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """A command, which may be refused; also if its error is of `kinds`."""
        if self._refusal is not None:
            raise ServerUnavailable(self._refusal)
        try:
            yield
        except NoScriptError:  # the caller sends the script
            raise
        except Exception as error:
            if not (refuses(error) or isinstance(error, kinds)):
                raise
            raise self.refuse(error) from error

    def send(self, message: str, publish: Callable[[], object], kinds: tuple[type[BaseException], ...]) -> None:
        """Publish `message`, unless an earlier try has published it."""
        self._named[message] += 1  # one task may be linked twice
        name = f"{self.scope} {message} {self._named[message]}"
        if name in self._sent:
            return
        self.message = name
        try:
            with self.guarded(kinds):
                publish()
        finally:
            self.message = None
        self._sent.add(name)


@contextmanager
def tried(name: str) -> Iterator[None]:
    """One try of something that has no later tries here. A refusal is raised as the error behind it."""
    try:
        with IdempotentCompletion(name).trying():
            yield
    except ServerUnavailable as refusal:
        raise refusal.reason from None


def trial() -> IdempotentCompletion | None:
    """The completion that this thread tries."""
    return getattr(_here, "once", None)


@contextmanager
def guarded() -> Iterator[None]:
    """A command that is refused if a try on this thread is. Outside a try it is a command like any other."""
    if (once := trial()) is None:
        yield
        return
    with once.guarded():
        yield


def sending(send: Callable[..., Any], confirm_timeout_s: float | None = None) -> Callable[..., Any]:
    """`send`, Celery's `send_task_message`: in a try, each message is sent once.

    `confirm_timeout_s`: how long RabbitMQ may take to confirm a message."""

    @wraps(send)
    def send_once(producer: Any, name: str, message: Any, **options: Any) -> Any:
        options.setdefault("confirm_timeout", confirm_timeout_s)
        if (once := trial()) is None:
            return send(producer, name, message, **options)
        connection = producer.connection
        kinds = (OperationalError, *connection.recoverable_connection_errors)
        identity = f"{message.headers.get('id')} {message.headers.get('retries') or 0}"
        given = {**options, "retry": True, "retry_policy": ONE_RETRY}
        once.send(identity, lambda: send(producer, name, message, **given), kinds)
        return None

    return send_once


def install() -> None:
    """Have Celery and kombu take random ids from the try, if there is one."""

    def new_id() -> UUID:
        return uuid4() if (once := trial()) is None else once.new_id()

    uuid.__defaults__ = (new_id,)
