"""Streams on their way to Redis: one script call a flush for all of them.

    text thread ──push──► Stream.pieces ──(publisher thread, publish.lua)──► log, channel, state

What the engine delivers is flushed at once, and what comes during a flush goes out with the next: the engine
delivers all streams together, once in `stream_interval_ms`, so the cost is one round trip an interval and not one
a token. When Redis is slow the pieces of a stream join into one delta; when it is away they wait here. That is
bounded: a task is taken from the queue only with an answer from Redis, so what can wait is the output of the tasks
that the pool holds.

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
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Protocol

import redis

from gpu_worker.request import Delta
from tasks.connections import LOST
from tasks.schemas import INTEREST_TTL_S, stream_keys
from tasks.worker import scripts
from tasks.worker.results import Outcome, Written, logprobs_json

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a stream's call also refreshes TTLs and looks for a cancel flag and for readers."""

_STALE, _GAP, _FLAGGED = 1, 2, 3
_STREAMS_A_CALL = 64
_CALLS_AHEAD = 2


class Listener(Protocol):
    """Who is told about a stream. Called on the publisher's thread."""

    def on_finished(self) -> None:
        """The end is in the log, and this attempt was the one that wrote it."""

    def on_stale(self) -> None:
        """A newer attempt owns the task."""

    def on_released(self) -> None:
        """Everything is in the log, and the task is marked as handed back."""

    def give_up(self) -> None:
        """The log is not what this attempt wrote, and cannot be mended here: the task is to be begun again."""

    def on_cancel(self, *, flagged: bool) -> None:
        """The task shall end: somebody asks for it, or nobody reads it. May be called more than once."""


class Call:
    """One script call: its arguments, and what it will have done for each stream: how many of its pieces and
    entries are in the log then, and what else was asked for (see publish.lua)."""

    def __init__(self, ttl_ms: int) -> None:
        self.keys: list[str] = []
        self.args: list[str | int] = [ttl_ms]
        self.turns: list[str | int] = []
        self.parts: list[tuple[Stream, int, int, str]] = []


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
        marked: bool = False,
    ) -> None:
        self.task_id, self.listener = task_id, listener
        self._publisher = publisher
        keys = stream_keys(task_id)
        self._keys = keys.log, keys.state
        self._attempt = str(attempt)
        self._begins = f'{{"task_id":{quote(task_id)},"attempt":{attempt},"index":'
        # What earlier attempts wrote is kept as sent: should Redis lose its log, it is sent again.
        self.pieces: list[Delta] = list(before.deltas)
        self.sent = self.entries = len(self.pieces)
        self.admitted = self.released = self.closed = False
        self.admitted_sent = marked
        self.adapter = ""
        self.final: tuple[Outcome, str] | None = None
        self.look_at = 0.0
        self.reader_since = time.monotonic() + INTEREST_TTL_S if needs_reader else float("inf")

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.pieces[-1].index + len(self.pieces[-1].token_ids) if self.pieces else 0

    def push(self, delta: Delta) -> None:
        """A piece of the output. The last one waits for `finish`, so that both make one entry of the log."""
        self._publisher._add(self, delta)

    def admit(self, adapter: str) -> None:
        """The attempt runs now: if nobody ends it or hands it back, its worker has died over it. `adapter`: what
        its tokens are made with, by content."""
        self.admitted, self.adapter = True, adapter
        if not self.admitted_sent:
            self._publisher._mark(self)

    def finish(self, outcome: Outcome) -> None:
        """The end. `on_finished` is called if this attempt still owns the task, `on_stale` otherwise."""
        self.final = outcome, json.dumps(outcome.record)
        self._publisher._mark(self)

    def release(self) -> None:
        """Hand the task back after what was pushed: `on_released` follows."""
        self.released = True
        self._publisher._mark(self)

    def drop(self) -> None:
        """Write nothing more, and tell nobody."""
        self.closed = True

    # ------------------------------------------------------------ publisher's thread

    def join(self, call: Call, now: float) -> None:
        """Append to a script call what this stream has."""
        # The pieces are read last: all of them are there when the end is.
        final = self.final
        does = self._does(now, final is not None)
        count, entries, payload = len(self.pieces), self.entries, ""
        if count > self.sent or final is not None:
            entries += 1
            payload = self._payload(self.pieces[self.sent : count], final)
        if payload and not self.entries and self.adapter and final is None:
            does += " adapter"
        if does:
            call.turns += (len(call.parts), does, self.adapter if final is None else final[1])
        call.keys += self._keys
        call.args += (self._attempt, entries, payload)
        call.parts.append((self, count, entries, does))

    def _does(self, now: float, last: bool) -> str:
        """What the script shall do beside writing a delta. Mostly nothing."""
        released, admitted = self.released and not last, self.admitted and not self.admitted_sent
        look = last or now >= self.look_at or not self.entries  # a log's first entry needs a TTL
        if not (look or released or admitted):
            return ""
        if look:
            self.look_at = now + LOOK_S
        read = look and now >= self.reader_since
        words = {"admitted": admitted, "last": last, "released": released, "look": look, "read": read}
        return " ".join(word for word, true in words.items() if true)

    def _payload(self, chunk: Sequence[Delta], final: tuple[Outcome, str] | None) -> str:
        """One entry of the log as JSON, written by hand: it is the hot path."""
        ids: list[int] = []
        text, extras = "", final is not None
        for delta in chunk:
            ids += delta.token_ids
            text += delta.text
            extras = extras or delta.logprobs is not None or delta.values is not None
        tokens = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
        index = chunk[0].index if chunk else self.end
        reason = "null" if final is None else quote(final[0].finish_reason)
        return (
            f'{self._begins}{index},"token_ids":[{tokens}],"text":{quote(text)},'
            f'"finish_reason":{reason}{_extras(chunk, final) if extras else ""}}}'
        )


def _extras(chunk: Sequence[Delta], final: tuple[Outcome, str] | None) -> str:
    extras = ""
    if any(delta.logprobs is not None for delta in chunk):
        extras += f',"logprobs":{json.dumps([e for delta in chunk for e in logprobs_json(delta.logprobs or ())])}'
    if any(delta.values is not None for delta in chunk):
        values = [value for delta in chunk for value in delta.values or [None] * len(delta.token_ids)]
        extras += f',"values":{json.dumps(values)}'
    if final is not None:
        record = final[0].record
        extras += f',"stop_reason":{json.dumps(final[0].stop_reason)}'
        if "error" in record:
            extras += f',"error":{json.dumps(record["error"])}'
    return extras


class Publisher:
    """The thread that flushes streams. `on_fatal`: something that should never happen has ended it."""

    on_fatal: Callable[[BaseException], object] | None = None

    def __init__(self, client: redis.Redis, *, ttl_s: float) -> None:
        self.ttl_ms = int(ttl_s * 1000)
        self._pipe = scripts.Pipe(client, "publish")
        self._changed = threading.Condition()
        self._dirty: dict[Stream, None] = {}
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

    def _add(self, stream: Stream, delta: Delta) -> None:
        with self._changed:
            stream.pieces.append(delta)
            if delta.finish_reason is None:
                self._due(stream)

    def _mark(self, stream: Stream) -> None:
        with self._changed:
            self._due(stream)

    def _due(self, stream: Stream) -> None:
        if not stream.closed:
            self._dirty[stream] = None
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self.flush(batch)
                if self._failing_since is not None:
                    self._pause()
        except Exception as error:
            logger.exception("streams: the publisher failed")
            if self.on_fatal is not None:
                self.on_fatal(error)

    def _next_batch(self) -> list[Stream] | None:
        """Wait for streams that have changed. None: closed."""
        with self._changed:
            while not (self._dirty or self._closing):
                self._changed.wait()
            batch = list(self._dirty)
            self._dirty.clear()
            return batch or None

    def flush(self, batch: Sequence[Stream]) -> None:
        """Write what these streams have. While the server runs one call, the next is put together."""
        on_their_way: deque[Call] = deque()
        try:
            for start in range(0, len(batch), _STREAMS_A_CALL):
                call, now = Call(self.ttl_ms), time.monotonic()
                for stream in batch[start : start + _STREAMS_A_CALL]:
                    if not stream.closed:
                        stream.join(call, now)
                if call.parts:
                    self._pipe.send(call.keys, [*call.args, *call.turns])
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

    def _answered(self, call: Call, reply: Sequence[int]) -> None:
        unexpected = {reply[i]: reply[i + 1 : i + 4] for i in range(0, len(reply), 4)}
        for position, (stream, sent, entries, does) in enumerate(call.parts):
            code, length, end = unexpected.get(position, (0, 0, 0)) if unexpected else (0, 0, 0)
            if code == _STALE:
                stream.closed = True
                stream.listener.on_stale()
            elif code == _GAP:
                self._rewind(stream, length, end)
            else:
                stream.sent, stream.entries = sent, entries
                if does:
                    self._done(stream, does)
                if code:
                    stream.listener.on_cancel(flagged=code == _FLAGGED)

    def _done(self, stream: Stream, does: str) -> None:
        stream.admitted_sent = stream.admitted_sent or "admitted" in does
        if "last" in does:
            stream.closed = True
            stream.listener.on_finished()
        elif "released" in does:
            stream.closed = True
            stream.listener.on_released()

    def _rewind(self, stream: Stream, entries: int, end: int) -> None:
        """The log has so many entries and ends there: go on with the piece that begins there."""
        with self._changed:
            starts = [piece.index for piece in stream.pieces]
            if end not in starts and end != stream.end:
                logger.error("stream %s: the log ends at %d, inside what this attempt wrote", stream.task_id, end)
                stream.listener.give_up()
                return
            stream.sent = starts.index(end) if end in starts else len(starts)
            stream.entries = entries
            stream.admitted_sent = False
            stream.look_at = 0.0
            self._due(stream)

    def _hold(self, streams: list[Stream], error: BaseException) -> None:
        """Redis is away or full: keep the pieces for the next call."""
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            logger.error("streams: Redis does not take them (%s); holding %d streams back", error, len(streams))
        with self._changed:
            for stream in streams:
                self._dirty[stream] = None

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


def closing_delta(task_id: str, error: dict[str, Any]) -> list[str]:
    """The arguments of `close.lua` for the end of a stream that no attempt owns; the script adds the numbers."""
    return [
        f'{{"task_id":{quote(task_id)},"attempt":',
        ',"index":',
        f',"token_ids":[],"text":"","finish_reason":"error","stop_reason":null,"error":{json.dumps(error)}}}',
        json.dumps({"finish_reason": "error", "error": error}),
    ]
