"""Threads that others give functions to: the one that owns the sequences, with its loop of commands, deadlines and
deliveries; and pools.

    round:  run the posted commands; end the requests whose deadline has passed; deliver; then what `turn` does
    idle:   sleep until the inbox has a command or a deadline passes

Other threads post commands (functions) to the inbox, so sequences need no locks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Protocol

from petiole.gpu_worker.request import FinishReason
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Emission
from petiole.gpu_worker.scheduling.stopping import End, Finish

logger = logging.getLogger(__name__)


Command = Callable[[], object]


class Sequences(Protocol):
    """The accepted requests of an engine, used on its thread alone. `emissions`: not delivered yet."""

    emissions: list[Emission]

    @property
    def has_work(self) -> bool: ...

    def enqueue(self, seq: ScheduledSequence) -> None: ...

    def finalize(self, seq: ScheduledSequence, end: End) -> None: ...

    def spoil(self, seq: ScheduledSequence, error: Exception) -> None: ...

    def audit(self) -> bool: ...

    def expired(self, now: float) -> Iterable[ScheduledSequence]: ...

    def next_deadline(self) -> float | None: ...


class CommandLoop:
    """The loop of a thread that owns sequences. All methods run on it; other threads call only `post` and `beat`.

    `deliver(emissions)` receives tokens and ends, in order. `on_fatal(error)` is called on this thread if the loop
    ends by an error; it must end every request.
    """

    def __init__(
        self,
        state: Sequences,
        deliver: Callable[[list[Emission]], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        self.state = state
        self.asleep = False
        self.last_round_s = time.monotonic()
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._stopping = False
        self._inbox: list[Command] = []
        self._wake = threading.Condition()

    # ------------------------------------------------------------ from other threads

    def post(self, command: Command) -> None:
        """Run `command` on this thread between two rounds."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def beat(self) -> None:
        """Note that the engine makes progress. Long commands and steps call it, on any thread."""
        self.last_round_s = time.monotonic()

    def unpause(self) -> None:
        """Go on after a pause. To be posted as a command."""

    def stop_when_done(self) -> None:
        """Return from `run` once no work is left. To be posted as a command."""
        self._stopping = True
        self.unpause()

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        try:
            while self._take_commands():
                if not self._turn():
                    self._sleep()
        except BaseException as error:
            self._fail(error)

    def _turn(self) -> bool:
        """What a round does beside commands. Returns False if there was nothing to do."""
        return False

    def _take_commands(self) -> bool:
        """Run the posted commands, end expired requests and deliver. Returns False when the loop should exit."""
        self.beat()
        if self._inbox:
            with self._wake:
                commands, self._inbox = self._inbox, []
            for command in commands:
                command()
        for seq in self.state.expired(time.perf_counter()):
            self.state.finalize(seq, Finish(FinishReason.DEADLINE))
        self.flush()
        return not self._stopping or self.state.has_work

    def flush(self) -> None:
        """Deliver the emissions collected so far."""
        if self.state.emissions:
            emissions, self.state.emissions = self.state.emissions, []
            self._trace_ends(emissions)
            self._deliver(emissions)

    def _trace_ends(self, emissions: list[Emission]) -> None: ...

    def drain(self) -> None:
        """Commit what is in flight."""

    def _sleep(self) -> None:
        self.flush()  # a turn may have ended a request
        deadline = self.state.next_deadline()
        with self._wake:
            if self._inbox or (self._stopping and not self.state.has_work):
                return
            self.asleep = True
            self._wake.wait(None if deadline is None else max(0.0, deadline - time.perf_counter()))
            self.asleep = False

    def _fail(self, error: BaseException) -> None:
        """End every request."""
        logger.critical("the engine has failed", exc_info=error)
        self._on_fatal(error)


class ThreadPool:
    """Calls queued functions in FIFO order on `number` threads, without results. Exceptions are logged.

    It is cheaper than `ThreadPoolExecutor`. The executor's `submit` creates a future, with a lock and a condition,
    which nobody needs here. It also acquires a semaphore that every idle worker uses."""

    def __init__(self, number: int, name: str) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}_{i}", daemon=True) for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Command) -> bool:
        """Queue a function. Returns False if the pool is closed; the function is then not called."""
        with self._lock:
            if not self._closed:
                self._queue.put(work)
            return not self._closed

    def close(self) -> None:
        """Stop accepting work. Returns when all queued functions have been called."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # a panic of native code is not an Exception
                logger.exception("%s raised", work)
            del work  # do not keep its objects until the next call
