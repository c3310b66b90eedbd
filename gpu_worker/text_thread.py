"""The text thread: tokens become text, stop strings end outputs, and every request ends here, once.

The engine thread posts what it committed, one batch a step; this thread turns it into deltas. It decides the
authoritative end of an output that a stop string cuts short: the engine may be some tokens ahead by then, is told
to stop, and what it still sends is dropped.

    post --> posted --(the thread wakes)--> held --(urgent, or due)--> deltas, ends

What is held for a request becomes one delta. A first token and an end are *urgent*: they wake the thread and are
delivered at once. An output that a stop string may end wakes it as well, and is read, since what the engine makes
beyond the end is lost. All else is delivered when `interval_s` has passed since the last such delivery; until then
the thread sleeps through what is posted: the price of a delta, and of taking turns with the threads that keep the
device busy, is paid once an interval and not once a step.

I8 holds because one thread ends handles, and `OutputStream.ended` remembers that it has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpu_worker.errors import EngineError
from gpu_worker.handle import Handle
from gpu_worker.request import Delta, FinishReason, Result, Timing, TokenLogprobs, Usage
from gpu_worker.scheduling.scheduled import ScheduledSequence
from gpu_worker.scheduling.state import Emission, Extras
from gpu_worker.scheduling.stopping import End, Finish
from gpu_worker.text import TextStream, Tokenizer

logger = logging.getLogger(__name__)


class OutputStream:
    """One request's output as the text thread sees it. `ended` is set once and only here.

    `begun`: something has been delivered; `watched`: a stop string may end it.
    `seq` and `requested_end` are the engine thread's: the request's sequence once it is accepted, and an end that
    was asked for before that.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.ended = False
        self.begun = False
        self.watched = bool(handle.request.sampling.stop)
        self.seq: ScheduledSequence | None = None
        self.requested_end: End | None = None
        self.text: TextStream | None = None
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop: str | None = None

    @property
    def wakes(self) -> bool:
        """Does all that comes wake the text thread?"""
        return self.watched or not self.begun

    def open(self, tokenizer: Tokenizer | None) -> None:
        """On the preparation thread. Tokens of an earlier attempt are replayed: their text is out already."""
        request = self.handle.request
        self.token_ids = [int(token) for token in request.resume_token_ids]
        if tokenizer is None:
            return
        self.text = TextStream(tokenizer, tuple(request.sampling.stop))
        piece = self.text.push(self.token_ids)
        self.texts.append(piece.text)
        self.stop = piece.stop
        if piece.stop is not None:
            del self.token_ids[piece.n_tokens :]

    def push(self, fresh: Sequence[int], terminal: bool) -> tuple[list[int], str]:
        """New tokens and the text that they bring. `terminal`: the last one ends the output and has no text."""
        taken = list(fresh)
        if self.text is None or self.stop is not None:
            taken = taken if self.stop is None else []
            self.token_ids += taken
            return taken, ""
        piece = self.text.push(taken[:-1] if terminal else taken)
        if piece.stop is not None:
            self.stop = piece.stop
            del taken[piece.n_tokens :]
        self.token_ids += taken
        return taken, piece.text

    def flush(self) -> str:
        """Text that was held back. It may complete a stop string."""
        if self.text is None or self.stop is not None:
            return ""
        text = self.text.flush()
        self.stop = self.text.stop
        return text


@dataclass(slots=True, eq=False)
class _Held:
    """What has come for a sequence and is not delivered: tokens, and what has been read of those before them."""

    tokens: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    text: str = ""
    extras: list[Extras] = field(default_factory=list)
    end: End | None = None


class TextThread:
    """Owns every `OutputStream` from the moment the engine accepts its request.

    `interval_s`: for how long what is not urgent may be held; 0 delivers everything as it comes.
    `stop_generating(seq)` tells the engine that an output has ended here. `on_end(handle)` is called when a
    request has ended, after its callbacks.
    """

    def __init__(
        self,
        model: str,
        stop_generating: Callable[[ScheduledSequence], None],
        on_end: Callable[[Handle], None],
        clock: Callable[[], float],
        interval_s: float = 0.0,
    ) -> None:
        self.model = model
        self._stop_generating = stop_generating
        self._on_end = on_end
        self._clock = clock
        self._interval_s = interval_s
        self._due_at = 0.0
        self._changed = threading.Condition()
        self._posted: list[Emission] = []
        self._calls: list[Callable[[], None]] = []
        self._urgent = self._pausing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ------------------------------------------------------------ from other threads

    def post(self, emissions: Sequence[Emission]) -> None:
        urgent = any(end is not None or seq.stream.wakes for seq, _, _, end in emissions)
        with self._changed:
            self._posted += emissions
            self._urgent |= urgent
            if urgent or not self._pausing:
                self._changed.notify()

    def refuse(self, stream: OutputStream, error: BaseException) -> None:
        """End a request that has no sequence."""
        self._call(lambda: self._end_with_error(stream, error))

    def flush(self) -> None:
        """Wait until everything posted so far has been delivered."""
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._call(done.set)
        while self._thread.is_alive() and not done.wait(1.0):
            pass

    def close(self) -> None:
        self._call(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        """On the text thread, when everything posted so far has been delivered; here, if that has ended."""
        with self._changed:
            if not self._closed:
                self._calls.append(function)
                self._urgent = True
                self._changed.notify()
                return
        function()

    # ------------------------------------------------------------ on the text thread

    def _run(self) -> None:
        held: dict[ScheduledSequence, _Held] = {}
        while not self._closed:
            posted, calls = self._next(bool(held))
            _hold(held, posted)
            due = bool(calls) or self._clock() >= self._due_at
            for seq, some in list(held.items()):
                if self._serve(seq, some, due):
                    del held[seq]
            if due:
                self._due_at = self._clock() + self._interval_s
            for call in calls:
                call()
        for call in self._calls:  # that came while it closed
            call()

    def _close(self) -> None:
        with self._changed:
            self._closed = True

    def _next(self, holding: bool) -> tuple[list[Emission], list[Callable[[], None]]]:
        """Wait for what is urgent, or until what is held is due."""
        with self._changed:
            while not self._urgent:
                left = self._due_at - self._clock() if holding or self._posted else None
                if left is not None and left <= 0:
                    break
                self._pausing = left is not None
                self._changed.wait(left)
            self._urgent = False
            posted, self._posted = self._posted, []
            calls, self._calls = self._calls, []
            return posted, calls

    def _serve(self, seq: ScheduledSequence, some: _Held, due: bool) -> bool:
        """Deliver what is held, if it is time to. False: it is held on."""
        stream = seq.stream
        if stream.ended:
            return True
        try:
            if stream.watched:
                _read(stream, some)
            urgent = some.end is not None or stream.stop is not None or not stream.begun
            if not (due or urgent):
                return False
            self._deliver(seq, stream, some)
        except Exception as error:  # a detokenizer that raises fails its own request
            logger.exception("the text of request %s failed", seq.request.request_id)
            cause = EngineError(f"request {seq.request.request_id} failed: {error!r}")
            self._end_with_error(stream, cause)
            self._stop_generating(seq)
        return True

    def _deliver(self, seq: ScheduledSequence, stream: OutputStream, some: _Held) -> None:
        handle, end = stream.handle, some.end
        if seq.scheduled_s is not None:
            handle._admit()
        _read(stream, some)
        taken, text = some.taken, some.text
        index = len(stream.token_ids) - len(taken)
        finish = end if isinstance(end, Finish) else None
        if finish is not None:
            text += stream.flush()
        if stream.stop is not None and not isinstance(end, BaseException):
            finish = Finish(FinishReason.STOP, stream.stop)
        stream.texts.append(text)
        logprobs = tuple(entry for extra in some.extras for entry in extra.logprobs or ())[: len(taken)]
        values = tuple(entry for extra in some.extras for entry in extra.values or ())[: len(taken)]
        stream.logprobs.extend(logprobs)
        if taken or text or finish is not None:
            reason = None if finish is None else finish.reason
            stream.begun = True
            handle._push(Delta(index, tuple(taken), text, reason, logprobs or None, values or None))
        if isinstance(end, BaseException):
            self._end_with_error(stream, end)
        elif finish is not None:
            stream.ended = True
            handle._end(self._result(seq, stream, finish))
            self._on_end(handle)
            if end is None:
                self._stop_generating(seq)

    def _end_with_error(self, stream: OutputStream, error: BaseException) -> None:
        if not stream.ended:
            stream.ended = True
            stream.handle._end(error)
            self._on_end(stream.handle)

    def _result(self, seq: ScheduledSequence, stream: OutputStream, finish: Finish) -> Result:
        now, arrival = self._clock(), seq.arrival_s
        first, scheduled = seq.first_token_s, seq.scheduled_s
        return Result(
            request_id=seq.request.request_id,
            text="".join(stream.texts),
            token_ids=tuple(stream.token_ids),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            usage=Usage(seq.num_input_tokens, seq.cached_prompt_tokens or 0, len(stream.token_ids)),
            timing=Timing(
                queue_ms=((now if scheduled is None else scheduled) - arrival) * 1e3,
                prefill_ms=0.0 if first is None or scheduled is None else (first - scheduled) * 1e3,
                ttft_ms=None if first is None else (first - arrival) * 1e3,
                total_ms=(now - arrival) * 1e3,
            ),
            model=self.model,
            logprobs=tuple(stream.logprobs) if stream.handle.request.sampling.logprobs is not None else None,
        )


def _hold(held: dict[ScheduledSequence, _Held], emissions: Iterable[Emission]) -> None:
    """Everything that belongs to one request together, in the order of first mention."""
    for seq, tokens, extras, end in emissions:
        some = held.get(seq)
        if some is None:
            some = held[seq] = _Held()
        some.tokens += tokens
        if extras is not None:
            some.extras.append(extras)
        if end is not None:
            some.end = end


def _read(stream: OutputStream, some: _Held) -> None:
    """Take the tokens that are to be read, and their text."""
    finish = some.end if isinstance(some.end, Finish) else None
    terminal = finish is not None and finish.reason is FinishReason.STOP and _is_token(finish.stop_reason)
    taken, text = stream.push(some.tokens, terminal and bool(some.tokens))
    some.tokens = []
    some.taken += taken
    some.text += text


def _is_token(stop_reason: str | int | None) -> bool:
    """Was it EOS or a stop token, whose text does not belong to the output?"""
    return stop_reason == "eos" or isinstance(stop_reason, int)
