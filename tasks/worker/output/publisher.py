"""Writes streams to Redis: each flush empties all changed outboxes, with one script call for up to 64 of them.

An outbox is the worker's end of a task's stream, for one attempt.

    text thread ──push──► Outbox.pieces ──(publisher thread, publish.lua)──► log, channel, state

Output is flushed at once; output that arrives during a flush is written by the next one. The engine delivers all
streams together, once in `stream_interval_ms`, so the cost is one round trip per interval instead of per token. If
Redis is slow, the pieces of an outbox are merged into one delta; if it is unreachable, they wait here. Memory is
bounded: the intake needs a reply from Redis to begin a task, so only the output of the pool's tasks can pile up.

A piece counts as sent when the script's reply confirms it. Other replies:

    stale   a newer attempt owns the task: the outbox is dropped and its listener notified
    gap     the log ends elsewhere (a reply was lost, or Redis lost its last writes): continue from there
    cancel  the cancel flag is set, or the stream has no reader: the listener is notified
    damaged the log or state has another type, or no number: the outbox is dropped and its listener notified

An outbox whose output cannot be written, or that Redis refuses, is dropped and its listener notified: no other
outbox waits for it. A call consists of bytes and numbers alone, so what cannot be encoded shows in its own outbox.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import redis

from petiole.contract.results.outputs import Prepared
from petiole.tasks.servers.connections import LOST
from petiole.tasks.servers.failover import caused_by_call
from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.keys import INTEREST_TTL_S, stream_keys
from petiole.tasks.wire.record import codec, ledger
from petiole.tasks.wire.record.codec import LoggedOutput, Tokens
from petiole.tasks.wire.record.scripts import PublishReply
from petiole.tasks.worker import scripts
from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.output.outcomes import Outcome

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often the call for an outbox also refreshes TTLs and checks for the cancel flag and for readers."""

_OUTBOXES_A_CALL = 64
_CALLS_AHEAD = 2


class Listener(Protocol):
    """Callbacks of an outbox, called on the publisher's thread."""

    def on_finished(self) -> None:
        """This attempt has written the last delta."""

    def on_stale(self) -> None:
        """A newer attempt owns the task."""

    def on_released(self) -> None:
        """All pieces are in the log, and the task is marked as handed back."""

    def on_damaged(self) -> None:
        """The log or the state cannot be written."""

    def on_fault(self, error: Exception) -> None:
        """This outbox's output cannot be written. Called once, and nothing after it."""

    def on_mismatch(self) -> None:
        """The log differs from what this attempt wrote and cannot be repaired: the task must be begun again."""

    def on_cancel(self, *, flagged: bool) -> None:
        """Cancel the task: the cancel flag is set (`flagged`), or it has no reader. May be called repeatedly."""


class ScriptCall:
    """The arguments of one script call. `parts` has, for each outbox, how many pieces and log entries are written
    after it, and its other operations (see publish.lua)."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self.keys: list[bytes] = []
        self.more_keys: list[bytes] = []
        self.args: list[bytes | int] = []
        self.turns: list[bytes | int] = []
        self.parts: list[tuple[Outbox, int, int, str]] = []

    def add(self, part: Part, said: tuple[Outbox, int, int, str]) -> None:
        """Raises UnicodeEncodeError, and adds nothing, if a text cannot be encoded."""
        keys, more_keys, args, turn = map(_encoded, part)
        turns = [len(self.parts), *turn] if turn else []
        self.keys += keys
        self.more_keys += more_keys
        self.args += args
        self.turns += turns
        self.parts.append(said)

    def send(self, pipe: scripts.Pipe) -> None:
        pipe.send(self.keys + self.more_keys, [self.ttl_ms, len(self.parts), *self.args, *self.turns])


class Part(NamedTuple):
    """An outbox's share of a call. `turn` may be empty."""

    keys: Sequence[str]
    more_keys: Sequence[str]
    args: Sequence[str | int]
    turn: Sequence[str | int]


def _encoded(values: Sequence[str | int]) -> list[Any]:
    return [value.encode() if isinstance(value, str) else value for value in values]


class Outbox:
    """One attempt's output to the stream of its task. Any thread may append to it, under the publisher's lock."""

    def __init__(
        self,
        publisher: Publisher,
        task_id: str,
        attempt: int,
        before: LoggedOutput,
        listener: Listener,
        *,
        needs_reader: bool = False,
        marked: bool = False,
        ttl_s: int | None = None,
        account: Account | None = None,
    ) -> None:
        """`account`: None: the task is not entered in the ledger."""
        self.task_id, self.listener, self._account = task_id, listener, account
        self._publisher = publisher
        self._keys = stream_keys(task_id)
        self._attempt = str(attempt)
        self._opening = codec.opening(task_id, attempt)
        # Pieces of earlier attempts are kept as sent, so that they can be sent again if Redis loses the log.
        self.pieces: list[Tokens] = list(before.deltas)
        self.sent = len(self.pieces)
        self.entries = self.sent + before.unreadable
        self.admitted = self.released = self.closed = False
        self.admitted_sent = marked
        self.prepared = ""
        self.prepared_sent = False
        self.prompt_tokens: int | None = None
        self.adapter = ""
        self.final: tuple[dict[str, Any], str] | None = None
        self.ttl_s = ttl_s  # after the end; before it, the publisher's counts
        self.look_at = 0.0
        self.reader_since = time.monotonic() + INTEREST_TTL_S if needs_reader else float("inf")

    @property
    def end(self) -> int:
        """The index after the last token."""
        return self.pieces[-1].index + len(self.pieces[-1].token_ids) if self.pieces else 0

    def of_prompt(self, at: int) -> bool:
        """Whether there is a piece at this place, and it is of the prompt."""
        return 0 <= at < len(self.pieces) and self.pieces[at].index < 0

    @property
    def waits(self) -> bool:
        """Whether there is more to write. The last piece waits for `finish`."""
        unsent = self.pieces[self.sent : self.sent + 1]
        return any(piece.finish_reason is None for piece in unsent) or (self.final is not None and not self.closed)

    def push(self, delta: Tokens) -> None:
        """Append a piece of output. The last piece is written by `finish`, as one log entry with the outcome."""
        self._publisher._add(self, delta)

    def prepare(self, prepared: Prepared) -> None:
        """Announce what is known of the task before it is admitted, unless its log has begun already. Texts may be
        prepared again, for another model."""
        self.prompt_tokens = prepared.prompt_tokens
        self.prepared, self.prepared_sent = codec.announced(self._opening, prepared), False
        self._publisher._mark(self)

    def admit(self, adapter: str) -> None:
        """Mark the task as running: if it is neither ended nor handed back, its worker has died. `adapter`
        identifies the adapter by its content."""
        self.admitted, self.adapter = True, adapter
        if not self.admitted_sent:
            self._publisher._mark(self)

    def finish(self, outcome: Outcome) -> None:
        """Write the last delta. Calls `on_finished` if this attempt still owns the task, otherwise `on_stale`."""
        record = outcome.record
        self.final = record, json.dumps(record)
        self._publisher._mark(self)

    def release(self) -> None:
        """Write the remaining pieces, then mark the task as handed back and call `on_released`."""
        self.released = True
        self._publisher._mark(self)

    def drop(self) -> None:
        """Write nothing more, and call no listener."""
        self.closed = True

    # ------------------------------------------------------------ publisher's thread

    def close(self) -> Listener:
        """Write nothing more. Returns the listener and forgets it. The listener refers to this outbox, and such a
        cycle would be kept until a garbage collection."""
        self.closed = True
        listener = self.listener
        del self.listener
        return listener

    def join(self, call: ScriptCall, now: float) -> None:
        """Append this outbox's arguments to a script call."""
        # Read `final` before the pieces: once it is set, all pieces have been pushed.
        final = self.final
        count = len(self.pieces)
        if self.of_prompt(self.sent):  # an entry of its own, so that entries stay small
            count, final = self.sent + 1, None
        operations = self._operations(now, final is not None)
        entries, payload = self.entries, ""
        if count > self.sent or final is not None:
            entries += 1
            pieces = self.pieces[self.sent : count]
            index = pieces[0].index if pieces else self.end
            end, after_prompt = None if final is None else final[0], index == 0 and self.of_prompt(self.sent - 1)
            payload = codec.merged(self._opening, index, pieces, end, after_prompt=after_prompt)
        if payload and not self.entries and self.adapter and final is None:
            operations += " adapter"
        more_keys: list[str] = []
        turn: tuple[str, ...] = ()
        if operations:
            value, entry = self.adapter if final is None else final[1], ""
            if "read" in operations:
                more_keys.append(self._keys.interest)
            if "look" in operations:
                more_keys.append(self._keys.asked)
            if final is not None and self._account is not None:
                operations, at = f"{operations} ledger", time.time()
                more_keys += ledger.keys_of(self._account, at)
                used = final[0], self.end, self.prompt_tokens
                entry = ledger.entry(self._account, self.task_id, int(self._attempt), *used, at)
            prepared = self.prepared if "prepared" in operations else ""
            turn = operations, value, prepared, entry
        keys = self._keys
        args = self._attempt, entries, payload, keys.channel
        call.add(Part((keys.log, keys.state), more_keys, args, turn), (self, count, entries, operations))

    def _operations(self, now: float, last: bool) -> str:
        """The script's operations besides writing a delta, separated by spaces. Usually empty."""
        released, admitted = self.released and not last, self.admitted and not self.admitted_sent
        prepared = bool(self.prepared) and not self.prepared_sent and not self.entries
        look = last or now >= self.look_at or not self.entries  # the first entry creates the log: set a TTL
        if not (look or released or admitted):
            return ""
        if look:
            self.look_at = now + LOOK_S
        read = look and now >= self.reader_since
        words = {"admitted": admitted, "last": last, "released": released, "look": look, "read": read}
        if last and self.ttl_s is not None:
            words[f"ttl={1000 * self.ttl_s}"] = True
        return " ".join(word for word, true in {**words, "prepared": prepared}.items() if true)


class Publisher:
    """The thread that empties outboxes. `on_fatal` is called if an unexpected exception ends it."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        ttl_s: float,
        on_fatal: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self.ttl_ms = int(ttl_s * 1000)
        self._on_fatal = on_fatal
        self._pipe = scripts.Pipe(client, "publish")
        self._changed = threading.Condition()
        self._dirty: dict[Outbox, None] = {}
        self._closing = False
        failing = "streams: Redis does not take them (%s); holding %d streams back"
        self._outage = Outage(logger, failing, "streams: Redis takes them again")
        self._thread = threading.Thread(target=self._run, name="petiole-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush for up to `timeout_s`, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._pipe.close()

    @property
    def behind_s(self) -> float:
        """Seconds since flushes began to fail; 0 if the last one succeeded."""
        return self._outage.lasts_s

    def _add(self, outbox: Outbox, delta: Tokens) -> None:
        with self._changed:
            outbox.pieces.append(delta)
            if delta.finish_reason is None:
                self._due(outbox)

    def _mark(self, outbox: Outbox) -> None:
        with self._changed:
            self._due(outbox)

    def _due(self, outbox: Outbox) -> None:
        if not outbox.closed:
            self._dirty[outbox] = None
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                self.flush(batch)
                del batch  # outboxes that are closed are not kept until the next flush
                if self._outage.lasts:
                    self._pause()
        except Exception as error:
            logger.exception("streams: the publisher failed")
            self._on_fatal(error)

    def _next_batch(self) -> list[Outbox] | None:
        """Wait for changed outboxes. None when closed."""
        with self._changed:
            while not (self._dirty or self._closing):
                self._changed.wait()
            batch = list(self._dirty)
            self._dirty.clear()
            return batch or None

    def flush(self, batch: Sequence[Outbox]) -> None:
        """Write the unsent parts of these outboxes. The next call is prepared while the server runs one."""
        in_flight: deque[ScriptCall] = deque()
        try:
            for start in range(0, len(batch), _OUTBOXES_A_CALL):
                call, now = ScriptCall(self.ttl_ms), time.monotonic()
                for outbox in batch[start : start + _OUTBOXES_A_CALL]:
                    if not outbox.closed:
                        with self._contained(outbox):
                            outbox.join(call, now)
                if call.parts:
                    call.send(self._pipe)
                    in_flight.append(call)
                if len(in_flight) > _CALLS_AHEAD:
                    self._answered(in_flight[0], self._pipe.receive())
                    in_flight.popleft()
            while in_flight:
                self._answered(in_flight[0], self._pipe.receive())
                in_flight.popleft()
        except (*LOST, redis.RedisError) as error:
            self._pipe.close()
            left = [outbox for outbox in batch if not outbox.closed]
            if not caused_by_call(error):
                self._hold(left, error)
            elif len(left) == 1:
                self._fault(left[0], error)
            else:  # because of one of them
                for outbox in left:
                    self.flush([outbox])
            return
        self._outage.ended()

    @contextmanager
    def _contained(self, outbox: Outbox) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fault(outbox, error)

    def _fault(self, outbox: Outbox, error: Exception) -> None:
        """The outbox's task ends as failed. One that is closed has its end, which its job could not be told: the
        error ends this worker, and another one completes the task."""
        if outbox.closed:
            raise RuntimeError(f"stream {outbox.task_id}: its job does not know its end") from error
        logger.error("stream %s: its output cannot be written", outbox.task_id, exc_info=error)
        outbox.close().on_fault(error)

    def _answered(self, call: ScriptCall, reply: Sequence[int]) -> None:
        unexpected = {reply[i]: reply[i + 1 : i + 4] for i in range(0, len(reply), 4)}
        for position, (outbox, sent, entries, operations) in enumerate(call.parts):
            code, length, end = unexpected.get(position, (0, 0, 0)) if unexpected else (0, 0, 0)
            with self._contained(outbox):
                if code == PublishReply.STALE:
                    outbox.close().on_stale()
                elif code == PublishReply.DAMAGED:
                    outbox.close().on_damaged()
                elif code == PublishReply.GAP:
                    self._rewind(outbox, length, end)
                else:
                    outbox.sent, outbox.entries = sent, entries
                    if operations:
                        self._done(outbox, operations)
                    if outbox.of_prompt(sent - 1) and outbox.waits:
                        self._mark(outbox)
                    if code and not outbox.closed:
                        outbox.listener.on_cancel(flagged=code == PublishReply.FLAGGED)

    def _done(self, outbox: Outbox, operations: str) -> None:
        outbox.admitted_sent = outbox.admitted_sent or "admitted" in operations
        outbox.prepared_sent = outbox.prepared_sent or "prepared" in operations
        if "last" in operations:
            outbox.close().on_finished()
        elif "released" in operations:
            outbox.close().on_released()

    def _rewind(self, outbox: Outbox, entries: int, end: int) -> None:
        """Continue with the piece that begins at `end`, where the log, of `entries` entries, ends."""
        with self._changed:
            starts = [piece.index for piece in outbox.pieces]
            anew = not entries and bool(starts) and starts[0] < 0  # the log was lost while it had the prompt alone
            if not anew and end not in starts and end != outbox.end:
                logger.error("stream %s: its log does not end with a delta of this attempt", outbox.task_id)
                outbox.listener.on_mismatch()
                return
            outbox.sent = starts.index(end) if entries and end in starts else len(starts) if entries else 0
            outbox.entries = entries
            outbox.admitted_sent = outbox.prepared_sent = False
            outbox.look_at = 0.0
            self._due(outbox)

    def _hold(self, outboxes: list[Outbox], error: BaseException) -> None:
        """Redis is unreachable or full: keep the outboxes for the next flush."""
        self._outage.began(error, len(outboxes))
        with self._changed:
            for outbox in outboxes:
                self._dirty[outbox] = None

    def _pause(self) -> None:
        """Wait before the flush that follows a failed one."""
        deadline = time.monotonic() + min(1.0, 0.05 + self.behind_s / 4)
        with self._changed:
            while (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
