"""The stream of one task, written by the scripts and in the form of a worker's.

A worker writes many streams at once and from a thread of its own. Here each call writes one, and waits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import redis

from petiole.contract.results.outputs import Delta, Prepared
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record import codec, scripts
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.wire.record.scripts import PublishReply


class StreamWriter:
    """`attempt`: 0 if the task is finished. `record`: how. `cancelled`: the cancel flag is set."""

    def __init__(self, client: redis.Redis, task_id: str, model: str, retries: int, ttl_s: int) -> None:
        self._keys, self._ttl_ms = stream_keys(task_id), 1000 * ttl_s
        self._publish = scripts.load(client, "publish")
        keys = self._keys.of_begin
        call = uuid.uuid4().hex
        arguments = [self._ttl_ms, model, 1, call, "", retries, call, 0, ""]
        [reply] = scripts.load(client, "begin")(keys, arguments)
        attempt, _, cancel, _, _, done, entries, *_ = reply
        self.attempt, self.cancelled = int(attempt), bool(cancel)
        self.record: dict[str, Any] | None = None if self.attempt else json.loads(done)
        self.written = LoggedOutput.of(entries)
        self._opening, self._entries = codec.opening(task_id, self.attempt), len(entries)
        self.end = len(self.written.token_ids)

    def announce(self, prepared: Prepared) -> None:
        """Tell readers what is known of the task before its first token."""
        self._write("", "look prepared", prepared=codec.announced(self._opening, prepared))

    def push(self, token_ids: Sequence[int], text: str) -> None:
        """Append a delta."""
        piece = Delta(self.end, tuple(token_ids), text)
        self.end += len(token_ids)
        self._entries += 1
        self._write(codec.merged(self._opening, piece.index, [piece]), "look")

    def finish(self, record: Mapping[str, Any]) -> None:
        """Append the last delta, which has no tokens. `record`: an `End`."""
        self._entries += 1
        self._write(codec.merged(self._opening, self.end, [], record), "last look", value=json.dumps(record))

    def _write(self, payload: str, operations: str, *, value: str = "", prepared: str = "") -> None:
        keys = self._keys
        delta = [self.attempt, self._entries, payload, keys.channel]
        looks = [keys.asked] if "look" in operations.split() else []
        reply = self._publish(
            [keys.log, keys.state, *looks], [self._ttl_ms, 1, *delta, 0, operations, value, prepared]
        )
        code = reply[1] if reply else 0
        if code in (PublishReply.STALE, PublishReply.GAP, PublishReply.DAMAGED):
            raise RuntimeError(f"petiole.testing: another worker, or a test, has written to {keys.log}")
        self.cancelled = self.cancelled or code == PublishReply.FLAGGED
