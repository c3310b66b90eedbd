"""Fails submissions at once while the broker is known to be away.

A submission tries for some seconds (`configuration.PUBLISH_RETRY_POLICY`). While one tries, others try, too. When
one has tried in vain, the breaker is open:

    closed ──a caller tries in vain──► open ──`PAUSE_S` later, for one caller──► probing
       ▲                                 ▲                                          │
       └───────────── the probe succeeds ┼──────────────── it fails ────────────────┘

While it is open, and while somebody else probes, callers fail at once with the reason that is known. So a thousand
callers of a broker that is down fail together, and none waits for the others' retries."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from petiole.tasks.errors import Unavailable

PAUSE_S = 1.0


class _BreakerState:
    def __init__(self) -> None:
        self.known: Unavailable | None = None
        self.probe_at = 0.0
        self.probing = threading.Lock()


class Breaker:
    """The breaker of an app, with a state for each process: a forked child begins with a closed one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._of_process: dict[int, _BreakerState] = {}

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """A context for one submission, in which `Unavailable` says that the caller has tried in vain. Raises
        `Unavailable` at once while the breaker is open."""
        state = self._state()
        known = state.known  # read once: another thread may close or open the breaker meanwhile
        if known is not None and not self._may_probe(state):
            raise Unavailable(known.url, known.reason)
        try:
            yield
        except Unavailable as error:
            state.known, state.probe_at = error, self._now() + PAUSE_S
            raise
        else:
            state.known = None
        finally:
            if known is not None:
                state.probing.release()

    def check(self) -> None:
        """Raises `Unavailable` if the next attempt would raise it at once. It needs no attempt after it."""
        state = self._state()
        known = state.known
        if known is not None and (self._now() < state.probe_at or state.probing.locked()):
            raise Unavailable(known.url, known.reason)

    def _state(self) -> _BreakerState:
        process = os.getpid()
        return self._of_process.get(process) or self._of_process.setdefault(process, _BreakerState())

    def _may_probe(self, state: _BreakerState) -> bool:
        return self._now() >= state.probe_at and state.probing.acquire(blocking=False)
