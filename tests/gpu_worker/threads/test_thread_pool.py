"""What is put is called, in order, until they are closed."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from petiole.gpu_worker.threads.inbox import ThreadPool


def test_one_thread_keeps_the_order() -> None:
    done: list[int] = []
    threads = ThreadPool(1, "test")
    for i in range(100):
        assert threads.put(lambda i=i: done.append(i))  # type: ignore[misc]
    threads.close()
    assert done == list(range(100))


def test_several_work_at_once() -> None:
    threads, meet = ThreadPool(3, "test"), threading.Barrier(3, timeout=30)
    for _ in range(3):
        threads.put(meet.wait)
    threads.close()
    assert not meet.broken


def test_closing_waits_and_then_nothing_is_taken() -> None:
    threads, gate, done = ThreadPool(2, "test"), threading.Event(), threading.Event()
    threads.put(gate.wait)
    threads.put(gate.wait)
    threads.put(done.set)
    closing = threading.Thread(target=threads.close)
    closing.start()
    gate.set()
    closing.join(30)
    assert done.is_set()
    assert not threads.put(done.clear)
    threads.close()
    assert done.is_set()


def test_what_raises_is_logged_and_the_next_is_called(caplog: pytest.LogCaptureFixture) -> None:
    threads, done = ThreadPool(1, "test"), threading.Event()
    with caplog.at_level(logging.ERROR, "petiole.gpu_worker.threads.inbox"):
        threads.put(lambda: 1 // 0)
        threads.put(sys.exit)
        threads.put(done.set)
        threads.close()
    assert done.is_set()
    assert "ZeroDivisionError" in caplog.text
    assert "SystemExit" in caplog.text
