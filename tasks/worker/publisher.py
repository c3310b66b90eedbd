"""Streams on their way to Redis: one script call a flush for all of them.

    text thread ──push──► Stream.pieces ──(publisher thread, publish.lua)──► log, channel, state

A stream's first token and its end are flushed at once; what comes between is collected for `interval_s` and
goes out with everybody else's, so the cost is one round trip a tick and not one a token. When Redis is slow the
pieces of a stream join into one delta; when it is away they wait here. That is bounded: a task is taken from
the queue only with an answer from Redis, so what can wait is the output of the tasks that the pool holds.

A piece counts as sent when the script has said so. When it says something else:

    stale   a newer attempt owns the task: the stream is dropped and its listener told
    gap     the log ends elsewhere (a reply was lost, or Redis lost its last second): go on from there
    cancel  the cancel flag is set, or the reader has gone: the listener is told
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, NamedTuple, Protocol

import redis

from tasks.connections import LOST
from tasks.schemas import INTEREST_TTL_S, stream_keys
from tasks.worker import scripts
from tasks.worker.results import Outcome, Written

logger = logging.getLogger(__name__)

_ADMITTED, _PAYLOAD, _LAST, _RELEASED, _REFRESH, _INTEREST = 1, 2, 4, 8, 16, 32
_STALE, _GAP, _FLAGGED = 1, 2, 3
_STREAMS_A_CALL = 64
_CALLS_AHEAD = 2


class Piece(NamedTuple):
    """What the engine's text thread hands over: tokens [start, start + len(token_ids)) and their text."""

    start: int
    token_ids: Sequence[int]
    text: str
    logprobs: list[dict[str, Any]] | None = None
    values: list[Any] | None = None


class Flushed(NamedTuple):
    """What one script call says of a stream: its first `sent` pieces, and which of its turns."""

    stream: Stream
    sent: int
    admitted: bool
    last: bool
    released: bool


class Listener(Protocol):
    """Who is told about a stream. Called on the publisher's thread."""

    def on_finished(self) -> None:
        """The end is in the log, and this attempt was the one that wrote it."""

    def on_stale(self) -> None:
        """A newer attempt owns the task."""

    def on_released(self) -> None:
        """Everything is in the log, and the task is marked as handed back."""

    def on_cancel(self, *, flagged: bool) -> None:
        """The task shall end: somebody asks for it, or nobody reads it. May be called more than once."""


class Stream:
    """One attempt at one task's stream. Written by any thread, under the publisher's lock."""

    def __init__(
        self,
        publisher: Publisher,
        task_id: str,
        attempt: int,
        before: Written,
        listener: Listener,
        *,
        needs_reader: bool = False,
    ) -> None:
        self.task_id, self.attempt, self.listener = task_id, attempt, listener
        self.keys = stream_keys(task_id)
        self._publisher = publisher
        self._head = f"{attempt}/"
        self._begins = f'{{"task_id":{quote(task_id)},"attempt":{attempt},"index":'
        # What earlier attempts wrote is kept as a piece that was sent: should Redis lose its log, it is sent
        # again.
        self.pieces: list[Piece] = []
        if before.token_ids:
            self.pieces.append(
                Piece(0, before.token_ids, before.text, before.logprobs or None, before.values or None)
            )
        self.sent = len(self.pieces)
        self.first_token_at = self.sent
        self.admitted = self.released = self.closed = False
        self.admitted_sent = False
        self.final: tuple[Outcome, str] | None = None
        self.refresh_at = 0.0
        self.reader_since = time.monotonic() + INTEREST_TTL_S if needs_reader else float("inf")

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.pieces[-1].start + len(self.pieces[-1].token_ids) if self.pieces else 0

    def push(self, piece: Piece, *, last: bool = False) -> None:
        """A piece of the output. The `last` one waits for `finish`, so that both make one delta."""
        self._publisher._add(self, piece, last)

    def admit(self) -> None:
        """The attempt runs now: if nobody ends it or hands it back, its worker has died over it."""
        self.admitted = True
        self._publisher._mark(self, urgent=False)

    def finish(self, outcome: Outcome) -> None:
        """The end. `on_finished` is called if this attempt still owns the task, `on_stale` otherwise."""
        self.final = outcome, json.dumps(outcome.record)
        self._publisher._mark(self, urgent=True)

    def release(self) -> None:
        """Hand the task back after what was pushed: `on_released` follows."""
        self.released = True
        self._publisher._mark(self, urgent=True)

    # ------------------------------------------------------------ publisher's thread

    def encode(self, now: float, keys: list[str], args: list[Any]) -> Flushed:
        """Append this stream's part of a script call. Returns what the call says if it succeeds."""
        # The pieces are read last: all of them are there when the end is.
        final, released, admitted = self.final, self.released, self.admitted
        count = len(self.pieces)
        chunk = self.pieces[self.sent : count]
        index = after = chunk[0].start if chunk else self.end
        flags = 0
        if admitted and not self.admitted_sent:
            flags = _ADMITTED
        if now >= self.refresh_at or final is not None:
            flags |= _REFRESH
            self.refresh_at = now + self._publisher.refresh_s
        if now >= self.reader_since:
            flags |= _INTEREST
        payload = ""
        if chunk or final is not None:
            flags |= _PAYLOAD
            if chunk:
                after = chunk[-1].start + len(chunk[-1].token_ids)
            payload = self._payload(index, chunk, final)
        elif released:
            flags |= _RELEASED
        keys += (self.keys.log, self.keys.state)
        if final is None:
            args += (flags, f"{self._head}{index}", f"{self._head}{after}", payload)
        else:
            args += (flags | _LAST, f"{self._head}{index}", f"{self._head}{after}/done", payload, final[1])
        return Flushed(self, count, admitted, final is not None, bool(flags & _RELEASED))

    def _payload(self, index: int, chunk: Sequence[Piece], final: tuple[Outcome, str] | None) -> str:
        """The delta as JSON, written by hand: it is the hot path."""
        if len(chunk) == 1:
            _, ids, text, logprobs, values = chunk[0]
            extras = "" if final is None and logprobs is None and values is None else _extras(chunk, final)
            token_ids = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
        else:
            text = "".join([piece.text for piece in chunk])
            token_ids = ",".join([str(token) for piece in chunk for token in piece.token_ids])
            extras = _extras(chunk, final)
        reason = "null" if final is None else quote(final[0].finish_reason)
        return (
            f'{self._begins}{index},"token_ids":[{token_ids}],"text":{quote(text)},'
            f'"finish_reason":{reason}{extras}}}'
        )


def _extras(chunk: Sequence[Piece], final: tuple[Outcome, str] | None) -> str:
    extras = ""
    if any(piece.logprobs is not None for piece in chunk):
        extras += f',"logprobs":{json.dumps([entry for piece in chunk for entry in piece.logprobs or ()])}'
    if any(piece.values is not None for piece in chunk):
        values = [value for piece in chunk for value in piece.values or [None] * len(piece.token_ids)]
        extras += f',"values":{json.dumps(values)}'
    if final is not None:
        record = final[0].record
        extras += f',"stop_reason":{json.dumps(final[0].stop_reason)}'
        if "error" in record:
            extras += f',"error":{json.dumps(record["error"])}'
    return extras


class Publisher:
    """The thread that flushes streams. `interval_s` 0 flushes every piece as it comes."""

    def __init__(self, client: redis.Redis, *, interval_s: float, ttl_s: float) -> None:
        self.interval_s = interval_s
        self.ttl_ms = int(ttl_s * 1000)
        self.refresh_s = max(1.0, ttl_s / 4)
        self._pipe = scripts.Pipe(client, "publish")
        self._changed = threading.Condition()
        self._dirty: dict[Stream, None] = {}
        self._urgent: dict[Stream, None] = {}
        self._tick_at: float | None = None
        self._closing = False
        self._failing_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="petiole-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush what can be flushed within `timeout_s` and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._pipe.close()

    @property
    def behind_s(self) -> float:
        """For how long Redis has not taken anything; 0 when it does."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def _add(self, stream: Stream, piece: Piece, last: bool) -> None:
        with self._changed:
            first = len(stream.pieces) == stream.first_token_at
            stream.pieces.append(piece)
            if not last:
                self._due(stream, urgent=first)

    def _mark(self, stream: Stream, *, urgent: bool) -> None:
        with self._changed:
            self._due(stream, urgent)

    def _due(self, stream: Stream, urgent: bool) -> None:
        if stream.closed:
            return
        if urgent:
            self._urgent[stream] = None
            self._changed.notify()
        elif stream not in self._dirty:
            self._dirty[stream] = None
            if self._tick_at is None:
                self._tick_at = time.monotonic() + self.interval_s
                self._changed.notify()

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            self.flush(batch)
            if self._failing_since is not None:
                self._pause()

    def _next_batch(self) -> list[Stream] | None:
        """Wait for what is due: the urgent streams, or at a tick all that have changed. None: closed."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._closing or (self._tick_at is not None and now >= self._tick_at):
                    batch = list(self._urgent | self._dirty)
                    self._urgent.clear()
                    self._dirty.clear()
                    self._tick_at = None
                    if batch or not self._closing:
                        return batch
                    return None
                if self._urgent:
                    batch = list(self._urgent)
                    self._urgent.clear()
                    for stream in batch:
                        self._dirty.pop(stream, None)
                    return batch
                self._changed.wait(None if self._tick_at is None else self._tick_at - now)

    def flush(self, batch: Sequence[Stream]) -> None:
        """Write what these streams have. While the server runs one call, the next is put together."""
        on_their_way: deque[list[Flushed]] = deque()
        try:
            for start in range(0, len(batch), _STREAMS_A_CALL):
                keys: list[str] = []
                args: list[Any] = [self.ttl_ms]
                now = time.monotonic()
                call = [
                    stream.encode(now, keys, args)
                    for stream in batch[start : start + _STREAMS_A_CALL]
                    if not stream.closed
                ]
                if call:
                    self._pipe.send(keys, args)
                    on_their_way.append(call)
                if len(on_their_way) > _CALLS_AHEAD:
                    self._answered(on_their_way[0], self._pipe.receive())
                    on_their_way.popleft()
            while on_their_way:
                self._answered(on_their_way[0], self._pipe.receive())
                on_their_way.popleft()
        except (*LOST, redis.RedisError) as error:
            self._pipe.close()
            self._hold([stream for stream in batch if not stream.closed], error)
            return
        self._recovered()

    def _answered(self, call: Sequence[Flushed], reply: Sequence[int]) -> None:
        unexpected = {reply[i]: (reply[i + 1], reply[i + 2]) for i in range(0, len(reply), 3)}
        for position, part in enumerate(call):
            code, at = unexpected.get(position, (0, 0)) if unexpected else (0, 0)
            if code == _STALE:
                part.stream.closed = True
                part.stream.listener.on_stale()
            elif code == _GAP:
                self._rewind(part.stream, at)
            else:
                self._sent(part)
                if code:
                    part.stream.listener.on_cancel(flagged=code == _FLAGGED)

    def _sent(self, part: Flushed) -> None:
        stream = part.stream
        stream.sent, stream.admitted_sent = part.sent, part.admitted
        if part.last:
            stream.closed = True
            stream.listener.on_finished()
        elif part.released:
            stream.closed = True
            stream.listener.on_released()
        elif stream.released:
            self._mark(stream, urgent=True)

    def _rewind(self, stream: Stream, at: int) -> None:
        """The log ends at `at`: go on with the piece that begins there."""
        with self._changed:
            starts = [piece.start for piece in stream.pieces]
            if at not in starts and at != stream.end:
                logger.error("stream %s: the log ends at %d, inside what this attempt wrote", stream.task_id, at)
                stream.closed = True
                stream.listener.on_stale()
                return
            stream.sent = starts.index(at) if at in starts else len(starts)
            stream.admitted_sent = False
            stream.refresh_at = 0.0
            self._due(stream, urgent=True)

    def _hold(self, streams: list[Stream], error: BaseException) -> None:
        """Redis is away or full: keep the pieces for the next call."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            logger.error("streams: Redis does not take them (%s); holding %d streams back", error, len(streams))
        with self._changed:
            for stream in streams:
                self._dirty[stream] = None
            self._tick_at = time.monotonic()

    def _pause(self) -> None:
        """Before the next call, after one that failed."""
        deadline = time.monotonic() + min(1.0, 0.05 + self.behind_s / 4)
        with self._changed:
            while (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)

    def _recovered(self) -> None:
        if self._failing_since is not None:
            logger.warning("streams: Redis takes them again, after %.1f s", self.behind_s)
            self._failing_since = None


def closing_delta(task_id: str, reason: str, stop_reason: str | None, error: dict[str, Any] | None) -> list[str]:
    """The arguments of `close.lua` for the end of a stream that no attempt owns; the script adds the numbers."""
    record = {"finish_reason": reason} | ({} if error is None else {"error": error})
    extra = f',"stop_reason":{json.dumps(stop_reason)}' + (
        "" if error is None else f',"error":{json.dumps(error)}'
    )
    return [
        f'{{"task_id":{quote(task_id)},"attempt":',
        ',"index":',
        f',"token_ids":[],"text":"","finish_reason":{quote(reason)}{extra}}}',
        json.dumps(record),
    ]
