"""The text thread: detokenizes outputs, matches stop strings, delivers deltas and ends requests.

The engine thread posts the emissions of each committed step. This thread collects them per request and delivers
them as deltas. It also decides where a stop string ends an output. The engine may have generated more tokens by
then; it is told to stop, and its further tokens for the request are dropped.

    post --> _posted --(thread wakes)--> pending output of each request --(urgent or due)--> delta or end

The pending output of a request is delivered as one delta. The first token and the end of a request are *urgent*:
they wake the thread and are delivered at once. Tokens of a request with stop strings also wake the thread, and are
detokenized at once, since tokens generated past a match are wasted. All other output is *due* once per
`interval_s`; the thread does not wake for it before that. So the cost of deltas, and of switching between this
thread and those that keep the device busy, arises once per interval instead of once per step.

Every request ends exactly once (I8): only this thread ends handles, and `RequestOutput.ended` records it. A fault
in a request's text ends that request. A fault of the thread itself ends the engine, whose thread then ends the
handles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from petiole.gpu_worker.exceptions import failed
from petiole.gpu_worker.preparation.output import RequestOutput, _is_terminal
from petiole.gpu_worker.request import Delta, FinishReason, Result, Timing, TokenLogprobs, Usage
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Emission, Extras, Generated, PromptScored, SequenceEnded
from petiole.gpu_worker.scheduling.stopping import End, Finish

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PendingOutput:
    """Output of a sequence that is not delivered yet.

    `tokens` are still to be detokenized; `kept` and `text` are the detokenized tokens and their text. `prompt`:
    tokens of the prompt with their log-probabilities.
    """

    tokens: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    text: str = ""
    extras: list[Extras] = field(default_factory=list)
    prompt: list[TokenLogprobs] = field(default_factory=list)
    end: End | None = None

    def entries(
        self, n: int
    ) -> tuple[tuple[TokenLogprobs, ...], tuple[tuple[float, ...], ...], tuple[Numbers, ...]]:
        """The log-probabilities, the values and their numbers of the first `n` tokens; empty if not asked for."""
        if not self.extras:
            return (), (), ()
        logprobs = tuple(entry for extra in self.extras for entry in extra.logprobs or ())
        values = tuple(entry for extra in self.extras for entry in extra.values or ())
        numbers = tuple(entry for extra in self.extras for entry in extra.numbers or ())
        return logprobs[:n], values[:n], numbers[:n]


class TextThread:
    """Owns every `RequestOutput` from the moment the engine accepts its request.

    `interval_s`: maximum delay of output that is not urgent; 0 delivers every step.
    `stop_generating(seq)` tells the engine that this thread has ended an output. `on_end(handle)` is called after
    a request has ended and its callbacks have run. `on_fatal(error)` is called if the thread ends by an error.
    """

    def __init__(
        self,
        model: str,
        stop_generating: Callable[[ScheduledSequence], None],
        on_end: Callable[[Handle], None],
        clock: Callable[[], float],
        on_fatal: Callable[[BaseException], None],
        interval_s: float = 0.0,
    ) -> None:
        self.model = model
        self._stop_generating = stop_generating
        self._on_end = on_end
        self._clock = clock
        self._on_fatal = on_fatal
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
        urgent = any(isinstance(emission, SequenceEnded) or emission.seq.output.wakes for emission in emissions)
        with self._changed:
            self._posted += emissions
            self._urgent |= urgent
            if urgent or not self._pausing:
                self._changed.notify()

    def refuse(self, output: RequestOutput, error: BaseException) -> None:
        """End a request with an error, after everything posted so far, unless it has ended."""
        self.call(lambda: self._end_with_error(output, error))

    def flush(self) -> None:
        """Wait until everything posted so far has been delivered."""
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self.call(done.set)
        while self._thread.is_alive() and not done.wait(1.0):
            pass

    def close(self) -> None:
        self.call(self._close)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the text thread after everything posted so far. If the text thread has ended, run it
        here."""
        with self._changed:
            if not self._closed:
                self._calls.append(function)
                self._urgent = True
                self._changed.notify()
                return
        function()

    # ------------------------------------------------------------ on the text thread

    def _run(self) -> None:
        try:
            self._serve_all()
        except BaseException as error:
            logger.critical("the text thread has failed", exc_info=error)
            self._close()
            self._on_fatal(error)
        for call in self._calls:  # posted while the thread was closing
            call()

    def _serve_all(self) -> None:
        outputs: dict[ScheduledSequence, _PendingOutput] = {}
        while not self._closed:
            posted, calls = self._next(bool(outputs))
            _collect(outputs, posted)
            due = bool(calls) or self._clock() >= self._due_at
            for seq, pending in list(outputs.items()):
                if self._serve(seq, pending, due):
                    del outputs[seq]
            if due:
                self._due_at = self._clock() + self._interval_s
            for call in calls:
                call()

    def _close(self) -> None:
        with self._changed:
            self._closed = True

    def _next(self, has_pending: bool) -> tuple[list[Emission], list[Callable[[], None]]]:
        """Wait until an urgent emission or a call arrives, or pending output is due."""
        with self._changed:
            while not self._urgent:
                left = self._due_at - self._clock() if has_pending or self._posted else None
                if left is not None and left <= 0:
                    break
                self._pausing = left is not None
                self._changed.wait(left)
            self._urgent = False
            posted, self._posted = self._posted, []
            calls, self._calls = self._calls, []
            return posted, calls

    def _serve(self, seq: ScheduledSequence, pending: _PendingOutput, due: bool) -> bool:
        """Deliver the pending output if it is due or urgent. Returns False if it stays pending."""
        output = seq.output
        if output.ended:
            return True
        try:
            if output.watched:
                _detokenize(output, pending)
            urgent = pending.end is not None or output.stop is not None or not output.begun
            if not (due or urgent):
                return False
            self._deliver(seq, output, pending)
        except BaseException as error:  # its own request fails; a panic of native code is not an Exception
            logger.exception("the text of request %s failed", seq.request.request_id)
            self._end_with_error(output, failed(seq.request.request_id, error))
            self._stop_generating(seq)
        return True

    def _deliver(self, seq: ScheduledSequence, output: RequestOutput, pending: _PendingOutput) -> None:
        handle, end = output.handle, pending.end
        if seq.scheduled_s is not None:
            handle._admit()
        if pending.prompt:
            self._deliver_prompt(seq, output, pending)
        _detokenize(output, pending)
        token_ids, text = pending.kept, pending.text
        index = len(output.token_ids) - len(token_ids)
        if (of_prompt := output.of_prompt(seq.num_input_tokens)) < 0:  # it ends before its output begins
            index = of_prompt
        finish = end if isinstance(end, Finish) else None
        if finish is not None:
            text += output.flush()
        if output.stop is not None and not isinstance(end, BaseException):
            finish = Finish(FinishReason.STOP, output.stop)
        output.texts.append(text)
        logprobs, values, numbers = pending.entries(len(token_ids))
        logprobs = output.spelled(logprobs)
        made = output.written(pending.extras)
        output.logprobs.extend(logprobs)
        if token_ids or text or finish is not None:
            reason = None if finish is None else finish.reason
            output.begun = True
            extras = (logprobs or None, values or None, numbers or None, output.read(token_ids, values))
            handle._push(Delta(index, tuple(token_ids), text, reason, *extras, **made))
        if isinstance(end, BaseException):
            self._end_with_error(output, end)
        elif finish is not None:
            self.end(output, self._result(seq, output, finish))
            if end is None:
                self._stop_generating(seq)

    def _deliver_prompt(self, seq: ScheduledSequence, output: RequestOutput, pending: _PendingOutput) -> None:
        entries, pending.prompt = tuple(pending.prompt), []
        if output.spelling is not None:
            entries = tuple(map(output.spelling.of_prompt, entries))
        ids, index = tuple(entry.token_id for entry in entries), output.of_prompt(seq.num_input_tokens)
        output.prompt += entries
        output.handle._push(Delta(index, ids, "", logprobs=entries))

    def end(self, output: RequestOutput, outcome: Result | BaseException) -> None:
        """End a request here, unless it has ended. Runs on the text thread."""
        if isinstance(outcome, BaseException):
            self._end_with_error(output, outcome)
        elif not output.ended:
            output.ended = True
            output.handle._end(outcome)
            self._on_end(output.handle)

    def _end_with_error(self, output: RequestOutput, error: BaseException) -> None:
        with self._changed:  # after the thread has ended, several other threads may be here
            ended, output.ended = output.ended, True
        if not ended:
            output.handle._end(error)
            self._on_end(output.handle)

    def _result(self, seq: ScheduledSequence, output: RequestOutput, finish: Finish) -> Result:
        now, arrival = self._clock(), seq.arrival_s
        first, scheduled = seq.first_token_s, seq.scheduled_s
        return Result(
            request_id=seq.request.request_id,
            text="".join(output.texts),
            token_ids=tuple(output.token_ids),
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            usage=Usage(seq.num_input_tokens, seq.cached_prompt_tokens or 0, len(output.token_ids)),
            timing=Timing(
                queue_ms=_ms(arrival, now if scheduled is None else scheduled),
                prefill_ms=0.0 if first is None or scheduled is None else _ms(scheduled, first),
                ttft_ms=None if first is None else _ms(arrival, first),
                total_ms=_ms(arrival, now),
                ended_at=round(time.time(), 3),
            ),
            model=self.model,
            logprobs=tuple(output.logprobs) if output.handle.request.sampling.logprobs is not None else None,
            prompt_logprobs=(
                tuple(output.prompt) if output.handle.request.sampling.prompt_logprobs is not None else None
            ),
            answer=output.answer(),
            draft_tokens=seq.draft_tokens,
            accepted_draft_tokens=seq.accepted_draft_tokens,
            **output.whole(),
        )


def _ms(since_s: float, until_s: float) -> float:
    """The time between, to a microsecond."""
    return round((until_s - since_s) * 1e3, 3)


def _collect(outputs: dict[ScheduledSequence, _PendingOutput], emissions: Iterable[Emission]) -> None:
    """Group emissions by sequence, in order of first appearance."""
    for emission in emissions:
        pending = outputs.get(emission.seq)
        if pending is None:
            pending = outputs[emission.seq] = _PendingOutput()
        match emission:
            case Generated(_, token_ids, extras):
                pending.tokens += token_ids
                if extras is not None:
                    pending.extras.append(extras)
            case PromptScored(_, entries):
                pending.prompt += entries
            case SequenceEnded(_, end):
                pending.end = end


def _detokenize(output: RequestOutput, pending: _PendingOutput) -> None:
    """Detokenize `pending.tokens`."""
    kept, text = output.push(pending.tokens, bool(pending.tokens) and _is_terminal(pending.end))
    pending.tokens = []
    pending.kept += kept
    pending.text += text
