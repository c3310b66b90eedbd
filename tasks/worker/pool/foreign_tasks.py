"""Foreign tasks, which are the app's tasks other than generations. They run on threads, as in Celery's
`threads` pool.

They share the worker's prefetch with the generations, so many long foreign tasks should have a queue and a worker
of their own. Their time limits are not enforced, and a running foreign task cannot be terminated, because a thread
cannot be killed: at shutdown the end of the process cuts it off, and its message goes back to the queue.

A task that kills its process takes the engine with it, and its message comes back. So Redis counts the deaths of
each foreign task, as it counts those of generations:

    run begins       the count of unfinished runs goes up by one; for a message that is new it starts at one
    run ends         the count is deleted
    worker shuts down    the count goes down by one: a deploy does not count as a death
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import redis
from billiard.einfo import ExceptionInfo

from petiole.gpu_worker.threads.inbox import ThreadPool
from petiole.tasks.errors import WorkersLost
from petiole.tasks.servers.connections import LOST
from petiole.tasks.traces import carried
from petiole.tasks.wire.headers import NESTING
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker.delivery.delivery import Delivery, Messages
from petiole.tasks.worker.delivery.mailbox import Callback, Mailbox
from petiole.tasks.worker.idempotency import ServerUnavailable
from petiole.tasks.worker.output.outcomes import forget_frames

logger = logging.getLogger(__name__)

THREADS = 4
DAY_S = 86_400


class ForeignTask:
    """A foreign task; the handle that Celery keeps a weak reference to. `ForeignTasks.running` keeps it alive."""

    def __init__(self, tasks: ForeignTasks, delivery: Delivery) -> None:
        self._tasks, self._messages = tasks, Messages(delivery)
        self.began_at: float | None = None

    def terminate(self, signal: object = None) -> None:
        """Does nothing: a thread cannot be killed."""

    @property
    def _delivery(self) -> Delivery:
        return self._messages.current

    @property
    def task_id(self) -> str:
        return self._delivery.task_id

    def is_same(self, delivery: Delivery) -> bool:
        """Whether `delivery` brings this task's message again. A retry or a replacement has the same id, too."""
        if delivery.message_name and delivery.message_name == self._delivery.message_name:
            return True
        return delivery.redelivered and _identity(self._delivery) == _identity(delivery)

    # ------------------------------------------------------------ consumer's thread

    def rebind(self, delivery: Delivery) -> None:
        """The message came again after a lost connection: go on, and answer the new request object."""
        self._messages.add(delivery)

    def _accept(self) -> None:
        assert self.began_at is not None
        self._messages.accept(self.began_at)

    def _settle(self, outcome: tuple[bool, object, float]) -> None:
        try:
            self._delivery.callback(outcome)
        except MemoryError:  # raised by the task itself and stored; Celery does not acknowledge the message
            self._delivery.request.acknowledge()
        finally:
            self._forget(outcome[1])

    def _fail(self, failure: ExceptionInfo) -> None:
        try:
            self._delivery.request.on_failure(failure)
        finally:
            self._forget(failure)

    def _withdraw(self) -> None:
        """Let Celery announce that the task was revoked or has expired, and acknowledge it."""
        try:
            if not self._delivery.request.revoked():
                self._delivery.requeue()
        finally:
            self._forget()

    def _requeue(self) -> None:
        self._delivery.requeue()
        self._forget()

    def _forget(self, failure: object = None) -> None:
        if isinstance(failure, ExceptionInfo):
            forget_frames(getattr(failure.exception, "exc", failure.exception))
        self._tasks.running.discard(self)
        self._messages.forget()

    # ------------------------------------------------------------ a thread of its own

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # a fault of this task is its own: its message is not held for ever
            self._tasks.mailbox.post(self._failing(error))

    def _run(self) -> None:
        delivery, tasks = self._delivery, self._tasks
        if tasks.closed:
            return
        if delivery.withdrawn:  # revoked or expired while it waited for a thread
            tasks.mailbox.post(self._withdraw)
            return
        deaths = tasks.deaths.begin(delivery)
        with tasks.closing:
            if not tasks.closed:
                self.began_at = time.monotonic()
        if self.began_at is None:
            tasks.deaths.hand_back([delivery.task_id])
            return
        tasks.mailbox.post(self._accept)
        poison = deaths >= tasks.deaths.limit
        end = self._failing(WorkersLost(deaths)) if poison else self._outcome(delivery)
        if not tasks.closed:
            tasks.deaths.end(delivery)
        tasks.mailbox.post(end)

    def _outcome(self, delivery: Delivery) -> Callback:
        """Run the task. The returned callback reports its outcome to Celery."""
        began = time.monotonic()
        try:
            with carried.following(carried.of(delivery.message)):
                outcome = delivery.target(*delivery.args)
        except Exception:
            outcome = True, ExceptionInfo(), time.monotonic() - began
        except ServerUnavailable as refusal:  # it is not counted in its chord, and runs again
            logger.error("task %s cannot be counted in its chord: %s; requeued", self.task_id, refusal)
            return self._requeue
        except BaseException as error:  # such as SystemExit, which Celery's trace does not store
            return self._failing(RuntimeError(f"the task raised {error!r}"))
        return lambda: self._settle(outcome)

    def _failing(self, error: Exception) -> Callback:
        failure = _failure(error)
        return lambda: self._fail(failure)


def _identity(delivery: Delivery) -> tuple[object, ...]:
    return delivery.task_name, delivery.task_id, delivery.retries, NESTING.of(delivery.message)


def _failure(error: Exception) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


class Deaths:
    """How many workers died while they ran a task. Without Redis no death is counted, and the task runs."""

    def __init__(self, client: redis.Redis, limit: int) -> None:
        self._client, self.limit = client, limit

    def begin(self, delivery: Delivery) -> int:
        """A run begins. Returns the number of earlier runs that neither ended nor were handed back."""
        key = stream_keys(delivery.task_id).runs
        try:
            if not (self._begun_before(delivery) or delivery.redelivered):
                self._client.set(key, 1, ex=DAY_S)
                return 0
            return self._add([key], 1) - 1
        except (*LOST, redis.RedisError) as error:
            logger.warning("task %s: its deaths are not counted: %s", delivery.task_id, error)
            return 0

    def end(self, delivery: Delivery) -> None:
        try:
            keys = stream_keys(delivery.task_id)
            self._client.delete(keys.runs, keys.messages)
        except (*LOST, redis.RedisError) as error:
            logger.warning("task %s: its end is not noted: %s", delivery.task_id, error)

    def hand_back(self, task_ids: Sequence[str]) -> None:
        """The worker shuts down in the middle of these runs."""
        try:
            self._add([stream_keys(task_id).runs for task_id in task_ids], -1)
        except (*LOST, redis.RedisError) as error:
            logger.warning("this shutdown counts as a death of %s: %s", ", ".join(task_ids), error)

    def _begun_before(self, delivery: Delivery) -> bool:
        """Whether a run of this message has begun before. Notes that one begins now."""
        if not delivery.message_name:
            return False
        key = stream_keys(delivery.task_id).messages
        pipe = self._client.pipeline()
        pipe.sadd(key, delivery.message_name)
        pipe.expire(key, DAY_S)
        return not pipe.execute()[0]

    def _add(self, keys: Sequence[str], number: int) -> int:
        """Change the counts in one round trip: a Redis that hangs must not delay a shutdown once for each task."""
        pipe = self._client.pipeline()
        for key in keys:
            pipe.incrby(key, number)
            pipe.expire(key, DAY_S)
        return int(pipe.execute()[0])


class ForeignTasks:
    """The foreign tasks of a worker. `running`: tasks that were taken and have not ended, even if no thread runs
    them yet. It changes on the consumer's thread only."""

    def __init__(self, mailbox: Mailbox, deaths: Deaths) -> None:
        self.mailbox, self.deaths = mailbox, deaths
        self.running: set[ForeignTask] = set()
        self.closed = False
        self.closing = threading.Lock()
        self._threads = ThreadPool(THREADS, "petiole-task")

    def apply(self, delivery: Delivery) -> ForeignTask:
        for known in self.running:
            if known.is_same(delivery):
                known.rebind(delivery)
                return known
        task = ForeignTask(self, delivery)
        self.running.add(task)
        self._threads.put(task.run)
        return task

    def close(self) -> int:
        """Start no more tasks, and do not wait for running ones: their messages go back to the queue, and they end
        with the process. Returns the number of tasks that have not ended."""
        with self.closing:
            again, self.closed = self.closed, True
        begun = [task.task_id for task in self.running if task.began_at is not None]
        if begun and not again:
            self.deaths.hand_back(begun)
        return len(self.running)
