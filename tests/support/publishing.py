"""One task whose attempts are begun and published by hand."""

from __future__ import annotations

import json
import threading
import uuid
from typing import Any

import redis

from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker import scripts
from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.output.outcomes import Outcome
from petiole.tasks.worker.output.publisher import Outbox, Publisher

TASK = "a-task"
KEYS = stream_keys(TASK)
END = Outcome({"finish_reason": "length", "stop_reason": "max_tokens"}, None, "length", "max_tokens")


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.any = threading.Event()

    def _hear(self, word: str) -> None:
        self.words.append(word)
        self.any.set()

    def on_finished(self) -> None:
        self._hear("finished")

    def on_stale(self) -> None:
        self._hear("stale")

    def on_damaged(self) -> None:
        self._hear("damaged")

    def on_released(self) -> None:
        self._hear("released")

    def on_fault(self, error: Exception) -> None:
        self._hear(type(error).__name__)

    def on_mismatch(self) -> None:
        self._hear("given up")

    def on_cancel(self, *, flagged: bool) -> None:
        self._hear("flagged" if flagged else "unread")


def begin(
    client: redis.Redis,
    *,
    retries: int = 0,
    model: str = "m",
    at_once: int = 0,
    again: int = 0,
    message: str = "a-message",
    call: str = "",
) -> BeginReply:
    """Each call without a name is another."""
    keys, name = [KEYS.log, KEYS.state, KEYS.completion, KEYS.asked], call or uuid.uuid4().hex
    args = [60_000, model, at_once, name, "w", retries, message, again, ""]
    return BeginReply.parse(scripts.load(client, "begin")(keys, args)[0])


def attempt(publisher: Publisher, client: redis.Redis, **options: Any) -> tuple[Outbox, Heard]:
    begun, heard = begin(client), Heard()
    return Outbox(publisher, TASK, begun.attempt, begun.written, heard, **options), heard


def log(client: redis.Redis) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in client.lrange(KEYS.log, 0, -1)]


def written(client: redis.Redis) -> list[int]:
    return LoggedOutput.of(client.lrange(KEYS.log, 0, -1)).token_ids


class Flaky:
    """A pipe whose calls may happen without an answer, or not at all."""

    def __init__(self, pipe: Any, faults: list[str]) -> None:
        self.pipe, self.faults = pipe, faults

    def send(self, keys: Any, args: Any) -> None:
        fault = self.faults.pop() if self.faults else ""
        if fault == "before":
            raise redis.ConnectionError("cut before the call")
        self.pipe.send(keys, args)
        if fault == "after":
            self.pipe.receive()
            raise redis.ConnectionError("cut after the call")

    def receive(self) -> Any:
        return self.pipe.receive()

    def close(self) -> None:
        self.pipe.close()
