"""Redis hangs for a while: streams wait in bounded memory, and nothing of them is lost or written twice."""

from __future__ import annotations

import json
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from petiole.gpu_worker.request import Delta
from petiole.tasks.servers.connections import redis_url
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.output.outcomes import Outcome
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from tests.support.site import RedisServer, eventually

STREAMS, TOKENS = 256, 30
MOST_BYTES_A_TOKEN = 400
END = Outcome({"finish_reason": "length"}, None, "length")


class Ends:
    """Listens to one stream."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def on_finished(self) -> None:
        self.words.append("finished")

    def on_stale(self) -> None:
        self.words.append("stale")

    def on_released(self) -> None:
        self.words.append("released")

    def on_cancel(self, *, flagged: bool) -> None:
        self.words.append("cancelled")


class Patient(Publisher):
    """Counts the calls that failed."""

    failures = 0

    def _hold(self, outboxes: list[Outbox], error: BaseException) -> None:
        super()._hold(outboxes, error)
        self.failures += 1

    def fail(self, times: int) -> None:
        after = self.failures + times
        eventually(lambda: self.failures >= after, "calls fail")


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may stop: it runs again afterwards, or could not be ended."""
    server = RedisServer(tmp_path)
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.kill()


def test_what_waits_is_bounded_and_comes_once(hanging: RedisServer) -> None:
    client = redis.Redis.from_url(redis_url(hanging.url), socket_timeout=0.2)
    publisher = Patient(client, ttl_s=60)
    publisher.start()
    ends = [Ends() for _ in range(STREAMS)]
    outboxes = [Outbox(publisher, f"task-{i}", 1, LoggedOutput(), listener) for i, listener in enumerate(ends)]

    def push(first: int) -> None:
        for token in range(first, first + TOKENS):
            for outbox in outboxes:
                outbox.push(Delta(token, (token,), f"{token} "))

    push(0)
    tracemalloc.start()
    try:
        hanging.process.send_signal(signal.SIGSTOP)
        push(TOKENS)
        publisher.fail(1)
        push(2 * TOKENS)
        publisher.fail(3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * TOKENS * STREAMS * MOST_BYTES_A_TOKEN
    hanging.process.send_signal(signal.SIGCONT)
    for outbox in outboxes:
        outbox.finish(END)
    eventually(lambda: all(listener.words for listener in ends), "the streams end")
    publisher.close()
    assert publisher.behind_s == 0
    assert [listener.words for listener in ends] == [["finished"]] * STREAMS
    for outbox in outboxes:
        entries = client.lrange(stream_keys(outbox.task_id).log, 0, -1)
        log, written = list(map(json.loads, entries)), LoggedOutput.of(entries)
        assert written.token_ids == list(range(3 * TOKENS))
        assert written.text == "".join(f"{token} " for token in range(3 * TOKENS))
        assert [delta["index"] for delta in log] == sorted({delta["index"] for delta in log})
        assert sum(delta["index"] >= TOKENS for delta in log) < 10, "what has waited comes in few pieces"
    client.close()
