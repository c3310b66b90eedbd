"""A runner ends when its lease cannot be renewed, and when its host has gone: also in the middle of a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

RUNNER = """
import os, sys, threading, time
from petiole.tasks.submission.batches.durable import watchdog
from petiole.tasks.submission.batches.durable.records import Lease

watchdog.GRACE_S = 0.3
lease = Lease("batch_0", "token", {ttl_s}, 1, 0)
leashed = watchdog.Watchdog(lease, {host})
print("begun", flush=True)
if {watched}:
    leashed.watch(lambda: print("stopped", flush=True))
{work}
"""
HOLDS_THE_INTERPRETER = "sum(range(10**14))"
LETS_OTHERS_RUN = "while True: time.sleep(0.01)"
RENEWS = "while True: time.sleep(0.01); lease._until = time.monotonic() + 100; leashed.renew()"


@contextmanager
def runner(
    work: str, ttl_s: float, watched: bool = False, host: str = "os.getppid()"
) -> Iterator[subprocess.Popen[str]]:
    script = RUNNER.format(work=work, ttl_s=ttl_s, watched=watched, host=host)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout is not None
            assert made.stdout.readline() == "begun\n"
            yield made
        finally:
            made.kill()


def test_a_lease_that_is_not_renewed_ends_it_also_in_code_that_lets_no_thread_run() -> None:
    with runner(HOLDS_THE_INTERPRETER, 0.2) as made:
        assert made.wait(60) == -14


def test_one_that_stands_still_ends_when_it_goes_on() -> None:
    with runner(LETS_OTHERS_RUN, 0.2) as made:
        assert made.wait(60) == -14


def test_whose_host_is_gone_is_told_to_stop_and_then_ended() -> None:
    with runner(RENEWS, 1000.0, watched=True) as made:
        assert made.stdin is not None
        assert made.stdout is not None
        made.stdin.close()
        assert made.stdout.readline() == "stopped\n"
        assert made.wait(60) == -14, "although it renews its lease"


def test_whose_parent_is_another_has_no_host_although_its_input_is_open() -> None:
    with runner(RENEWS, 1000.0, watched=True, host="-1") as made:
        assert made.stdout is not None
        assert made.stdout.readline() == "stopped\n"
        assert made.wait(60) == -14
