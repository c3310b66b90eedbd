"""The text thread: tokens become text, stop strings end outputs, and every request ends here, once.

The engine thread posts what it committed, one batch a step; this thread turns it into deltas. It decides the
authoritative end of an output that a stop string cuts short: the engine may be some tokens ahead by then, is told
to stop, and what it still sends is dropped. When this thread falls behind, what has piled up for a request becomes
one delta, so a slow reader costs batches, not memory.

I8 holds because one thread ends handles, and `OutputStream.ended` remembers that it has.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from gpu_worker.errors import EngineError
from gpu_worker.handle import Handle
from gpu_worker.request import Delta, FinishReason, Result, Timing, TokenLogprobs, Usage
from gpu_worker.scheduling.scheduled import ScheduledSequence
from gpu_worker.scheduling.state import Emission, Extras
from gpu_worker.scheduling.stopping import Finish
from gpu_worker.text import TextStream, Tokenizer

logger = logging.getLogger(__name__)

End = Finish | BaseException


class OutputStream:
    """One request's output as the text thread sees it. `ended` is set once and only here.

    `seq` and `requested_end` are the engine thread's: the request's sequence once it is accepted, and an end that
    was asked for before that.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.ended = False
        self.seq: ScheduledSequence | None = None
        self.requested_end: End | None = None
        self.text: TextStream | None = None
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop: str | None = None

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


class TextThread:
    """Owns every `OutputStream` from the moment the engine accepts its request.

    `stop_generating(seq)` tells the engine that an output has ended here. `on_end(handle)` is called when a
    request has ended, after its callbacks.
    """

    def __init__(
        self,
        model: str,
        stop_generating: Callable[[ScheduledSequence], None],
        on_end: Callable[[Handle], None],
        clock: Callable[[], float],
    ) -> None:
        self.model = model
        self._stop_generating = stop_generating
        self._on_end = on_end
        self._clock = clock
        self._queue: SimpleQueue[Sequence[Emission] | Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ------------------------------------------------------------ from other threads

    def post(self, emissions: Sequence[Emission]) -> None:
        self._queue.put(emissions)

    def refuse(self, stream: OutputStream, error: BaseException) -> None:
        """End a request that has no sequence."""
        self._queue.put(lambda: self._end_with_error(stream, error))

    def flush(self) -> None:
        """Wait until everything posted so far has been delivered."""
        if threading.current_thread() is self._thread:
            return
        done = threading.Event()
        self._queue.put(done.set)
        while self._thread.is_alive() and not done.wait(1.0):
            pass

    def close(self) -> None:
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ------------------------------------------------------------ on the text thread

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            emissions: list[Emission] = []
            while item is not None and not callable(item):
                emissions.extend(item)
                try:
                    item = self._queue.get_nowait()
                except Empty:
                    break
            else:
                self._deliver_all(emissions)
                if item is None:
                    return
                item()
                continue
            self._deliver_all(emissions)

    def _deliver_all(self, emissions: Iterable[Emission]) -> None:
        """Everything that belongs to one request at once, in the order of first mention."""
        merged: dict[int, tuple[ScheduledSequence, list[int], list[Extras], list[End]]] = {}
        for seq, tokens, extras, end in emissions:
            entry = merged.get(id(seq))
            if entry is None:
                entry = merged[id(seq)] = (seq, [], [], [])
            entry[1].extend(tokens)
            if extras is not None:
                entry[2].append(extras)
            if end is not None:
                entry[3].append(end)
        for seq, fresh, extra, ends in merged.values():
            if seq.stream.ended:
                continue
            try:
                self._deliver(seq, seq.stream, fresh, extra, ends[0] if ends else None)
            except Exception as error:  # a detokenizer that raises fails its own request
                logger.exception("the text of request %s failed", seq.request.request_id)
                cause = EngineError(f"request {seq.request.request_id} failed: {error!r}")
                self._end_with_error(seq.stream, cause)
                self._stop_generating(seq)

    def _deliver(
        self,
        seq: ScheduledSequence,
        stream: OutputStream,
        fresh: list[int],
        extras: Sequence[Extras],
        end: End | None,
    ) -> None:
        handle = stream.handle
        if seq.scheduled_s is not None:
            handle._admit()
        index = len(stream.token_ids)
        finish = end if isinstance(end, Finish) else None
        terminal = finish is not None and finish.reason is FinishReason.STOP and _is_token(finish.stop_reason)
        taken, text = stream.push(fresh, terminal and bool(fresh))
        if finish is not None:
            text += stream.flush()
        if stream.stop is not None and not isinstance(end, BaseException):
            finish = Finish(FinishReason.STOP, stream.stop)
        stream.texts.append(text)
        logprobs = tuple(entry for extra in extras for entry in extra.logprobs or ())[: len(taken)]
        values = tuple(entry for extra in extras for entry in extra.values or ())[: len(taken)]
        stream.logprobs.extend(logprobs)
        if taken or text or finish is not None:
            reason = None if finish is None else finish.reason
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


def _is_token(stop_reason: str | int | None) -> bool:
    """Was it EOS or a stop token, whose text does not belong to the output?"""
    return stop_reason == "eos" or isinstance(stop_reason, int)
