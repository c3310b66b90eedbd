"""Merges a log and a channel with overlapping contents into one stream: every token once, in order.

A stream begins with the token 0, or with tokens of the prompt, at negative indices. Only the log says with which.

The log is a list of deltas without gaps or overlaps: each begins at the index where the previous one ends. The
channel carries the same deltas, but may lose some and deliver some twice. The reader's state is its position in
the log (`LogPosition`). A published delta is handled by where it begins:

    at the position        it is the next entry of the log: accept it
    before the position    it was already read from the log: drop it
    after the position     a delta was missed: read the log

What has been returned to the caller (`next`, `text_length`) is counted separately from the position in the log.
The two differ only when the log has been restarted: Redis failed over to a replica that lacked the last writes, or
the task was retried. The same request produces the same tokens, possibly split into other deltas, so the part that
was already returned is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.wire.record.codec import without


@dataclass(slots=True)
class LogPosition:
    """The end of the log's first `entries` deltas, in tokens and in characters of text.

    `last` is the index at which the last of them begins.
    """

    entries: int = 0
    index: int = 0
    text_length: int = 0
    last: int = 0

    def pass_by(self, delta: StreamDelta) -> None:
        """From the beginning of the delta to its end."""
        self.entries += 1
        self.last, self.index = delta.index, delta.index + len(delta.token_ids)
        self.text_length += len(delta.text)

    def ends_with(self, delta: StreamDelta) -> bool:
        return (delta.index, delta.end, delta.finish_reason) == (self.last, self.index, None)


class StreamAssembler:
    """`published` and `logged` return the new deltas; `finished` is set after the last one."""

    def __init__(self, start: int = 0) -> None:
        self.position = LogPosition()
        self.start = self.next = start
        self.text_length = 0
        self.attempt = 0
        self.finished = self._begun = False

    def published(self, delta: StreamDelta) -> list[StreamDelta] | None:
        """The new deltas, given one from the channel; None if the log must be read."""
        begun, ahead = self.position.entries > 0, delta.index - self.position.index
        if self.finished or delta.attempt < self.attempt or (begun and ahead < 0):
            return []
        if ahead > 0 or (not begun and (delta.index < 0 or delta.after_prompt is True)):
            return None
        return self._accept(delta)

    @property
    def read_from(self) -> int:
        """First log entry to read: the one before `position`, which shows whether the log was restarted."""
        return max(0, self.position.entries - 1)

    def logged(self, deltas: Sequence[StreamDelta]) -> list[StreamDelta] | None:
        """The new deltas, given the log from `read_from` on. None if the log was restarted: then `rewind`."""
        if self.position.entries and not (deltas and self.position.ends_with(deltas[0])):
            return None
        new: list[StreamDelta] = []
        for delta in deltas[self.position.entries - self.read_from :]:
            if not self.position.entries and delta.index < 0:
                self.position = LogPosition(index=delta.index)
                self.next = self.next if self._begun else min(self.next, delta.index)
            if not self.finished and delta.index == self.position.index:
                new += self._accept(delta)
        return new

    def begin(self, token: int, entries: int, deltas: Sequence[StreamDelta]) -> None:
        """Begin with this token. `deltas`: of the log, the one that begins at the token or last before it, and has
        `entries` before it; and before that the last of those. The texts of those that are skipped have an unknown
        length. So of a delta with the token in its middle the whole text is returned."""
        at, before = deltas[-1:], deltas[:-1]
        self.position = (
            LogPosition(entries, at[0].index, 0, *(delta.index for delta in before)) if at else LogPosition()
        )
        self.start = self.next = token
        self.text_length = 0

    def rewind(self) -> None:
        """Read the log from its beginning. Deltas that were already returned are not returned again."""
        self.position = LogPosition()

    def _accept(self, delta: StreamDelta) -> list[StreamDelta]:
        position = self.position
        known_tokens, known_text = self.next - delta.index, self.text_length - position.text_length
        position.pass_by(delta)
        self._begun = True
        if delta.attempt > self.attempt:
            self.attempt = delta.attempt
        self.finished = delta.finish_reason is not None
        if position.index <= self.start and delta.token_ids:
            known_text = len(delta.text)
        if position.index > self.next:
            self.next = position.index
        if position.text_length > self.text_length:
            self.text_length = position.text_length
        if known_tokens <= 0 and known_text <= 0:
            return [delta]
        rest = without(delta, max(0, known_tokens), max(0, known_text))
        return [rest] if rest.token_ids or rest.text or rest.finish_reason else []
