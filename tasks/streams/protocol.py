"""The protocol of a stream's reader, without input or output.

`read` is a generator. It yields deltas for the reader, and operations to perform: tuples such as `("pause", 1.0)`,
or `("receive", left_s)`, where `left_s()` says for how long. For an operation it is sent the result; if the
operation failed, `ConnectionLost` is thrown into it. `readers` performs the operations, with redis-py or
redis.asyncio. `assembly` decides which deltas are new.

    subscribe ─► read the log ─► receive ◄─────────────────────┐
        ▲                          │ the next delta ───────────┤ yield it
        │                          │ a gap ─► read the log ────┤
        │                          │ 1 s without a delta ─► has the task ended? ─► read the log
        │                          │     messages were missed: distrust the subscription, subscribe
        └── pause ◄── connection lost (anywhere)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from celery.states import FAILURE, REVOKED, SUCCESS
from pydantic import ValidationError

from petiole.contract.results.task_result import GenerationResult, ShownPiece, StreamDelta
from petiole.tasks import errors
from petiole.tasks.errors import StreamError, StreamExpired, StreamTimeout
from petiole.tasks.streams.assembly import StreamAssembler
from petiole.tasks.wire.record.codec import without

LEAST_S = 0.001  # time to take what has come already
SILENCE_S = 1.0  # time without a delta before the log is read: pub/sub may lose messages
LOST_FOR_S = 60.0  # time without a connection before giving up
LOOKS_TOGETHER = 30  # of this many looks in a row, all but the last are shared with other streams
PROBES = 16  # entries that are looked at together, to find the one with a token
LOG_GONE_FOR = 10  # silences in a row, each with the log missing, after which the log counts as expired
LAST = {SUCCESS, FAILURE, REVOKED}

Parse = Callable[[bytes], StreamDelta]
"""Reads a delta, or raises pydantic's ValidationError. It may return an object with the same attributes."""
Step = StreamDelta | tuple[Any, ...]
Reading = Generator[Step, Any, None]


class ConnectionLost(Exception):  # noqa: N818
    """Thrown into the protocol when an operation failed: the connection and its subscription are lost."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def read(
    task_id: str,
    timeout_s: float | None,
    heartbeat_s: float | None = None,
    *,
    prepared: bool = False,
    start: int = 0,
    fresh: bool = False,
    shared: bool = False,
    parse: Parse = StreamDelta.model_validate_json,
) -> Reading:
    """The protocol. `timeout_s` limits the wait for each delta; `heartbeat_s` limits the wait for a delta or a
    heartbeat. `prepared`: also yield the delta that announces the task. `start`: the token to begin with. `fresh`:
    the task is submitted when the first subscription is made, so nothing can be in its log before. `shared`: most
    looks after a silence are shared with other streams: `("quiet", ...)` asks whether nothing has happened."""
    stream = StreamProtocol(task_id, timeout_s, heartbeat_s, prepared=prepared, start=start)
    stream.shared, stream.parse = shared, parse
    lost_since: float | None = None
    while not stream.assembler.finished:
        try:
            yield ("subscribe",)
            if not fresh:
                yield from stream.catch_up()
            fresh, lost_since = False, None
            yield from stream.follow()
        except ConnectionLost as lost:
            fresh = False
            now = time.monotonic()
            lost_since = lost_since or now
            stream.check_time(lost.error)
            if now - lost_since > LOST_FOR_S:
                what = f"no connection to the streams' Redis for {LOST_FOR_S:.0f} s: {lost.error}"
                raise StreamError(what) from lost.error
            yield from stream.heartbeat()
            yield ("pause", min(1.0, 0.02 + (now - lost_since) / 2))


class StreamProtocol:
    """The state of one reader.

    `announced`: the attempt whose announcement was yielded. `unannounced`: the reader asked for one, and the log
    was not begun yet when it was last read. `begun`: the log's entry with the token `start` was found."""

    def __init__(
        self,
        task_id: str,
        timeout_s: float | None,
        heartbeat_s: float | None = None,
        *,
        prepared: bool = False,
        start: int = 0,
    ) -> None:
        self.task_id, self.timeout_s, self.heartbeat_s = task_id, timeout_s, heartbeat_s
        if heartbeat_s is not None and heartbeat_s < SILENCE_S:
            raise ValueError(f"heartbeat_s: must be at least {SILENCE_S:g}, got {heartbeat_s!r}")
        if start < 0:
            raise ValueError(f"start: must be at least 0, got {start!r}")
        self.unannounced, self.announced = prepared, 0
        self.start, self.begun = start, not start
        self.handed_out_at = time.monotonic()
        self.assembler = StreamAssembler(start)
        self.last_delta_at = time.monotonic()
        self.listening_since = self.last_delta_at
        self.silences_without_log = self.looks = 0
        self.shared = False
        self.parse: Parse = StreamDelta.model_validate_json

    def check_time(self, cause: BaseException | None = None) -> None:
        if self.timeout_s is not None and time.monotonic() - self.last_delta_at >= self.timeout_s:
            raise StreamTimeout(f"task {self.task_id}: no delta for {self.timeout_s:g} s") from cause

    def delta(self, raw: bytes) -> StreamDelta:
        try:
            return self.parse(raw)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise StreamError(
                f"task {self.task_id}: a delta of its stream cannot be read: {first['msg']}"
            ) from None

    def hand_out(self, deltas: list[StreamDelta]) -> Reading:
        for delta in deltas:
            yield delta
            if delta.error is not None:
                raise errors.rebuild(delta.error)
        if deltas:
            self.looks = 0
            self.last_delta_at = self.handed_out_at = time.monotonic()

    def heartbeat(self) -> Reading:
        """Yield an empty delta if one is due."""
        if self.heartbeat_s is not None and time.monotonic() - self.handed_out_at >= self.heartbeat_s:
            yield self.empty()
            self.handed_out_at = time.monotonic()

    def empty(self) -> StreamDelta:
        position = self.assembler
        return StreamDelta(
            task_id=self.task_id, attempt=position.attempt, index=position.next, token_ids=[], text=""
        )

    def announcement(self, delta: StreamDelta) -> list[StreamDelta]:
        """What announces the task, unless it was yielded."""
        if delta.attempt <= self.announced:
            return []
        self.announced = delta.attempt
        return [delta.model_copy(update={"index": self.assembler.next})]

    def catch_up(self) -> Reading:
        """Yield the new deltas of the log."""
        new = yield from self.unread()
        yield from self.hand_out(new)

    def unread(self) -> Generator[Step, Any, list[StreamDelta]]:
        """The log's deltas after the reader's position. The position moves after them at once. So yield them
        before any operation that may fail."""
        while True:
            if not self.begun:
                yield from self.seek(self.start)
            first, news = self.assembler.read_from, []
            if self.unannounced:
                entries, log_length, state, begin = yield ("read_all", first)
                news = self.found(state.get(b"prepared"), *begin)
            else:
                entries, log_length = yield ("read_log", first)
            new = self.assembler.logged([self.delta(raw) for raw in entries])
            if new is not None:
                self.silences_without_log = 0
                return news + new
            if log_length == 0:
                self.silences_without_log += 1
                return news
            if self.start:
                self.start, self.begun = self.assembler.next, False
            else:
                self.assembler.rewind()

    def found(self, prepared: bytes | None, first: bytes | None = None) -> list[StreamDelta]:
        """What announces the task, given that of the state and the first delta of the log. It was written before
        the first delta, by the same attempt; otherwise it is that of an earlier one, and worth nothing."""
        self.unannounced = first is None
        delta = None if prepared is None else self.delta(prepared)
        if delta is None or (first is not None and self.delta(first).attempt != delta.attempt):
            return []
        return self.announcement(delta)

    def seek(self, token: int) -> Generator[Step, Any, None]:
        """Set the position before the last entry of the log that begins at this token or before it. The others are
        not read, but for some of their indices."""
        [length] = yield ("read_entries", [])
        low, high = 0, min(length, token + 1)  # an entry has a token or more; entry `low` begins early enough
        if high < length:
            first, _ = yield ("read_entries", [0])
            if first and self.delta(*first).index < 0:  # entries of the prompt come before those of the output
                high = length
        while high - low > 1:
            places = sorted({low + (high - low) * k // (PROBES + 1) for k in range(1, PROBES + 1)} - {low})
            *entries, _ = yield ("read_entries", places)
            found = dict(zip(places, entries, strict=True))
            early = [place for place, raw in found.items() if raw and self.delta(*raw).index <= token]
            low, high = max(early, default=low), min(found.keys() - early, default=high)
        *entries, _ = yield ("read_entries", [place for place in (low - 1, low) if 0 <= place < high])
        self.assembler.begin(token, low, [self.delta(*raw) for raw in entries if raw])
        self.begun = True

    def follow(self) -> Reading:
        assembler, receive = self.assembler, ("receive", self.receive_s)
        while not assembler.finished:
            self.listening_since = time.monotonic()
            raw = yield receive
            if raw is None:
                yield from self.heartbeat()
                yield from self.after_silence()
                continue
            delta = self.delta(raw)
            if delta.prepared is not None:
                yield from self.hand_out(self.announcement(delta) if self.unannounced else [])
                continue
            if self.unannounced and delta.attempt == self.announced and delta.index == 0:
                self.unannounced = False
            new = None if self.unannounced else assembler.published(delta)
            if new is None:
                yield from self.catch_up()
            elif new:
                yield from self.hand_out(new)

    def receive_s(self) -> float:
        """For how long still to wait for a delta. Not positive: no longer than to take what has come already."""
        until = self.listening_since + SILENCE_S
        if self.timeout_s is not None:
            until = min(until, self.last_delta_at + self.timeout_s)
        if self.heartbeat_s is not None:
            until = min(until, self.handed_out_at + self.heartbeat_s)
        return until - time.monotonic()

    def after_silence(self) -> Reading:
        """No delta arrived: the subscription may be dead, or the task may have ended without a stream."""
        self.looks += 1
        looks_together = self.shared and self.begun and self.looks % LOOKS_TOGETHER != 0
        if looks_together and (yield ("quiet", self.assembler.position.entries, self.unannounced)):
            self.check_time()
            return
        state, result = yield ("outcome",)  # before the log: if the task has ended, the log is complete
        new = yield from self.unread()
        if new:
            yield from self.hand_out(new)
            if not (yield ("hears",)):
                yield ("distrust",)
                if self.assembler.finished:
                    return
                yield ("subscribe",)
            yield from self.catch_up()
        elif state in LAST:
            yield from self.end_as(state, result)
        elif self.silences_without_log >= LOG_GONE_FOR:
            raise StreamExpired(f"task {self.task_id}: its log is gone after token {self.assembler.next}")
        else:
            self.check_time()

    def end_as(self, state: str, result: Any) -> Reading:
        """End the stream of a task whose log has no last delta: the task never ran, or the log has expired."""
        self.assembler.finished = True
        last = self.empty()
        if state == REVOKED:
            ending = "expired" if str(result) == "expired" else "revoked"  # Celery's other reason: "terminated"
            yield last.model_copy(update={"finish_reason": "cancelled", "stop_reason": ending})
        elif state == FAILURE:
            yield last.model_copy(update={"finish_reason": "error", "error": errors.describe(result)})
            raise result
        else:
            try:
                whole = GenerationResult.model_validate(result)
            except ValidationError:
                raise StreamExpired(f"task {self.task_id}: it has ended, and its log is gone") from None
            shown = ShownPiece.model_fields.keys()
            same = StreamDelta.model_fields.keys() & GenerationResult.model_fields.keys() - shown
            if self.start and whole.text and self.assembler.next < len(whole.token_ids):
                raise StreamExpired(f"task {self.task_id}: its log is gone before token {self.assembler.next}")
            if whole.prompt_logprobs and not self.assembler.position.entries and not self.start:
                ids = [entry.token_id for entry in whole.prompt_logprobs]
                prompt = {"index": -len(ids), "token_ids": ids, "logprobs": whole.prompt_logprobs}
                yield last.model_copy(update=prompt)
            everything = last.model_copy(update={"index": 0, **{name: getattr(whole, name) for name in same}})
            if not self.assembler.next:
                thought = None if whole.reasoning is None else whole.reasoning.text
                parts = {"content": whole.content, "tool_calls": whole.tool_calls, "reasoning": thought}
                everything = everything.model_copy(update=parts)
            known_text = len(whole.text) if self.start else self.assembler.text_length
            yield without(everything, self.assembler.next, known_text)
