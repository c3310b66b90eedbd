"""What ends a runner that nothing else ends. A timer of the kernel's, which is set again whenever the lease is
renewed, ends the process with SIGALRM: also while its main thread is in code that lets no other thread run.

    the lease is renewed ──► the timer is set to the lease's end, and `GRACE_S`
    its host has gone    ──► the runner is told to stop; the timer is set to `GRACE_S`, for the last time"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from petiole.tasks.submission.batches.durable.records import Lease

GRACE_S = 10.0
"""For writing what has come."""
LOOK_S = 1.0
MOST_BYTES = 4 * 2**30
"""The most memory that a runner may allocate."""


class Watchdog:
    """`host`: the process that has started this one."""

    def __init__(self, lease: Lease, host: int) -> None:
        self._lease, self._host, self._cut = lease, host, False
        self._lock = threading.Lock()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        self.renew()

    def renew(self) -> None:
        with self._lock:
            if not self._cut:
                signal.setitimer(signal.ITIMER_REAL, self._lease.left_s + GRACE_S)

    def watch(self, stop: Callable[[], object]) -> None:
        """Begin to look for the host: it is another process's parent, or standard input has ended, when it has
        gone."""
        threading.Thread(target=self._watch, args=(stop,), name="petiole-leash", daemon=True).start()

    def _watch(self, stop: Callable[[], object]) -> None:
        while os.getppid() == self._host:
            ready, _, _ = select.select([sys.stdin], [], [], LOOK_S)
            if ready and not os.read(sys.stdin.fileno(), 1):
                break
        with self._lock:
            self._cut = True
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        stop()


def limit_memory() -> None:
    """Let a row that takes too much memory end this process, and no other one of its container."""
    import resource

    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
