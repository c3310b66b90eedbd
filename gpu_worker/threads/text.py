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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from petiole.gpu_worker.errors import failed
from petiole.gpu_worker.handle import Handle
from petiole.gpu_worker.protocols import PositionalSkill, SkillState
from petiole.gpu_worker.request import Delta, FinishReason, Result, Timing, TokenLogprobs, Usage
from petiole.gpu_worker.request.texts import Made, Pooled
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.scheduling.scheduled import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Emission, Ended, Extras, Generated, PromptScored
from petiole.gpu_worker.scheduling.stopping import End, Finish, StopRules
from petiole.gpu_worker.text import Spelling, TextAssembler, Tokenizer

logger = logging.getLogger(__name__)


class RequestOutput:
    """The output of one request. Owned by the text thread, except `seq` and `requested_end`.

    `begun`: a delta has been delivered. `watched`: the request has stop strings. `ended`: the handle has ended.
    The engine thread owns `seq`, the sequence once it is accepted, and `requested_end`, an end requested before
    that. `write`: of a model of texts, makes the vector or the scores that are delivered.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.ended = False
        self.begun = False
        self.watched = bool(handle.request.sampling.stop)
        self.seq: ScheduledSequence | None = None
        self.requested_end: End | None = None
        self.text: TextAssembler | None = None
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt: list[TokenLogprobs] = []
        self.made: list[Made] = []
        self.write: Callable[[Pooled], Made] | None = None
        self.stop: str | None = None
        self.reading: SkillState | PositionalSkill | None = None
        self.spelling: Spelling | None = None

    @property
    def wakes(self) -> bool:
        """Whether every emission of this request wakes the text thread."""
        return self.watched or not self.begun

    def of_prompt(self, n_tokens: int) -> int:
        """The index of the next token of the prompt that is delivered, of this many; 0 if none is."""
        request = self.handle.request
        asked = request.sampling.prompt_logprobs is not None
        return request.resume_prompt_tokens + len(self.prompt) - n_tokens if asked else 0

    def open(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        rules: StopRules,
        reading: SkillState | PositionalSkill | None = None,
        write: Callable[[Pooled], Made] | None = None,
    ) -> None:
        """Set up detokenization and replay the tokens of an earlier attempt, whose text was delivered already.
        `reading`: reads a skill's answer from what follows. `write`: makes the vector or the scores that are
        delivered.

        Runs on a preparation thread.
        """
        request, self.reading, self.write = self.handle.request, reading, write
        sampling = request.sampling
        answers = request.prompt is None and not request.continue_final_message
        if tokenizer is not None:
            visible: dict[str, Any] = {
                "skip_special_tokens": sampling.skip_special_tokens,
                "shown": request.shown_tokens,
                "before": () if answers else prompt,
            }
            self.text = TextAssembler(
                tokenizer,
                tuple(sampling.stop),
                include_stop=sampling.include_stop,
                min_tokens=sampling.min_tokens,
                **visible,
            )
            if sampling.logprob_texts:
                self.spelling = Spelling(tokenizer, **visible)
        resumed = [int(token) for token in request.resume_token_ids]
        if self.spelling is not None:
            self.spelling.push(resumed)
        _, text = self.push(resumed, _is_terminal(rules.cut((), resumed)[1]))
        self.texts.append(text)

    def push(self, fresh: Sequence[int], terminal: bool) -> tuple[list[int], str]:
        """Append tokens. Returns those up to the end of the output, and their text.

        `terminal`: the last token ends the output (EOS or a stop token). It has text only with `include_stop`.
        """
        kept = list(fresh)
        if self.text is None or self.stop is not None:
            kept = kept if self.stop is None else []
            self.token_ids += kept
            return kept, ""
        hidden = terminal and not self.handle.request.sampling.include_stop
        piece = self.text.push(kept[:-1] if hidden else kept)
        if piece.stop is not None:
            self.stop = piece.stop
            del kept[piece.n_tokens :]
        self.token_ids += kept
        return kept, piece.text

    def spelled(self, logprobs: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """The same with the tokens' texts, bytes and lengths, if the request asks for them."""
        return logprobs if self.spelling is None else tuple(map(self.spelling.of, logprobs))

    def read(
        self, token_ids: Sequence[int], values: Sequence[tuple[float, ...]]
    ) -> tuple[Mapping[str, float] | None, ...] | None:
        """The point or box of a skill's answer that each token completes; None if no token completes any."""
        reading = self.reading
        if reading is None:
            return None
        items = tuple(
            reading.consume_step(token, values[k] if k < len(values) else ()) for k, token in enumerate(token_ids)
        )
        return items if any(item is not None for item in items) else None

    def written(self, extras: Sequence[Extras]) -> dict[str, Any]:
        """The vectors or scores among these extras, as a field. Raises EngineError for one that is not finite."""
        if self.write is None:
            return {}
        made = [self.write(pooled) for extra in extras for pooled in extra.pooled or ()]
        self.made += made
        return fields_of(made)

    def whole(self) -> dict[str, Any]:
        """All vectors or scores, as a field."""
        return {} if self.write is None else fields_of(self.made)

    def flush(self) -> str:
        """Return the text held back so far. It may complete a stop string."""
        if self.text is None or self.stop is not None:
            return ""
        text = self.text.flush()
        self.stop = self.text.stop
        return text


def fields_of(made: Sequence[Made]) -> dict[str, Any]:
    """What is made of some texts, by the field of a delta."""
    return {name: tuple(one[name] for one in made) for name in (made[0] if made else ())}


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
        urgent = any(isinstance(emission, Ended) or emission.seq.output.wakes for emission in emissions)
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
            answer=None if output.reading is None else output.reading.finalize(),
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
            case Ended(_, end):
                pending.end = end


def _detokenize(output: RequestOutput, pending: _PendingOutput) -> None:
    """Detokenize `pending.tokens`."""
    kept, text = output.push(pending.tokens, bool(pending.tokens) and _is_terminal(pending.end))
    pending.tokens = []
    pending.kept += kept
    pending.text += text


def _is_terminal(end: End | None) -> bool:
    """Whether the output ended with EOS or a stop token."""
    if not isinstance(end, Finish) or end.reason is not FinishReason.STOP:
        return False
    return end.stop_reason == "eos" or isinstance(end.stop_reason, int)
