"""The accepted requests in vLLM, and what comes back of them. Used on the engine thread alone.

    enqueue ──submit──► vLLM: it queues, schedules, preempts
                          │ outputs
                          ▼
    admitted with the first output; tokens are cut where our rules end the output; then the end, and a cancel

A sequence ends here, whatever vLLM still makes of it: later outputs find no sequence. vLLM begins a grammar anew
in each request, so the output of a constrained sequence is held until its end. An interrupted one begins again;
one that has tokens had ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from petiole.engines.vllm import wording
from petiole.gpu_worker.exceptions import AdapterError, EngineError, InvalidRequest
from petiole.gpu_worker.request import FinishReason
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import (
    Admitted,
    Counters,
    Emission,
    Extras,
    Generated,
    PromptScored,
    SequenceEnded,
)
from petiole.gpu_worker.scheduling.stopping import End, Finish
from petiole.gpu_worker.threads.inbox import CommandLoop

_SATISFIED = Finish(FinishReason.STOP, "constraint")


class VllmLoop(CommandLoop):
    """The loop of the thread that owns the sequences."""

    state: VllmSequences

    def unpause(self) -> None:
        self.state.resume()


class VllmSequences:
    """Implements `Sequences`. `say` sends a message to the child; `adapter` names a sequence's adapter to vLLM."""

    def __init__(
        self,
        say: Callable[..., None],
        adapter: Callable[[ScheduledSequence], tuple[str, int, str] | None],
        limits: ModelLimits,
    ) -> None:
        self._say, self._adapter, self._limits = say, adapter, limits
        self._numbers = itertools.count(1)
        self._open: dict[int, ScheduledSequence] = {}
        self._number: dict[ScheduledSequence, int] = {}
        self._held: dict[ScheduledSequence, list[Emission]] = {}
        self.emissions: list[Emission] = []
        self.counters = Counters()
        self.hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def enqueue(self, seq: ScheduledSequence) -> None:
        """Submit a sequence, unless what it resumes is complete."""
        n = next(self._numbers)
        self._open[n], self._number[seq] = seq, n
        grammar = wording.grammar_of(seq.constraint)
        if grammar is not None:
            if seq.generated:
                return self.finalize(seq, _end_of(seq, grammar))
            self._held[seq] = []
        if len(seq.generated) < seq.max_output_tokens:  # otherwise `OpenRequests` ends it
            self._say(do="submit", n=n, adapter=self._adapter(seq), **wording.submission(seq, self._limits))
        return None

    def finalize(self, seq: ScheduledSequence, end: End) -> None:
        """End a request, once."""
        if seq.finalized:
            return
        seq.finalized = True
        n = self._number.pop(seq)
        del self._open[n]
        held = self._held.pop(seq, [])
        if isinstance(end, Finish):
            self.emissions += held
        self.emissions.append(SequenceEnded(seq, end))
        self.counters.finished += 1
        self._say(do="cancel", n=n)

    def resume(self) -> None:
        """Have vLLM go on after a pause."""
        self._say(do="resume", n=0)

    def spoil(self, seq: ScheduledSequence, error: Exception) -> None:
        self.finalize(seq, error)

    def audit(self) -> bool:
        return True

    def _with_deadline(self) -> Iterator[tuple[float, ScheduledSequence]]:
        for seq in self._open.values():
            if seq.request.deadline_s is not None and seq.scheduled_s is not None:
                yield seq.scheduled_s + seq.request.deadline_s, seq

    def expired(self, now: float) -> list[ScheduledSequence]:
        return [seq for at, seq in self._with_deadline() if at <= now]

    def next_deadline(self) -> float | None:
        return min((at for at, _ in self._with_deadline()), default=None)

    # ------------------------------------------------------------ what comes back

    def receive(self, outputs: list[dict[str, Any]]) -> None:
        for output in outputs:
            if (seq := self._open.get(output["n"])) is not None:
                self._take(seq, output)

    def _take(self, seq: ScheduledSequence, output: dict[str, Any]) -> None:
        tokens, now = output["tokens"], time.perf_counter()
        if "error" in output:
            return self.finalize(seq, _error_of(seq, output["failed"], output["error"]))
        if seq.scheduled_s is None:
            seq.scheduled_s, seq.cached_prompt_tokens = now, min(output.get("cached", 0), seq.num_input_tokens)
            self.emissions.append(Admitted(seq))
            self.hits += seq.cached_prompt_tokens
            self.counters.prompt_tokens += seq.num_input_tokens - seq.cached_prompt_tokens
        if "prompt" in output and seq.wants_scores:
            self._score(seq, output["prompt"])
        end: End | None
        kept, end = seq.rules.cut(seq.generated, tokens)
        followed, early = self._followed(seq, tokens[:kept])
        tokens, end = tokens[:followed], (end if followed == kept else None) or early
        if tokens:
            seq.first_token_s = seq.first_token_s or now
            extras = self._extras(seq, tokens, output.get("logprobs"))
            self._held.get(seq, self.emissions).append(Generated(seq, tokens, extras))
            seq.generated += tokens
            self.counters.generated_tokens += len(tokens)
        if (
            end is None and output.get("end") == "length" and seq.images
        ):  # they take more of the context than is known
            end = Finish(FinishReason.LENGTH, "max_model_len")  # they take more of it than is known here
        elif end is None and "end" in output:
            end = EngineError(f"vLLM ended request {seq.request.request_id}: {output['end']}")
        if end is not None:
            self.finalize(seq, end)
        return None

    def _followed(self, seq: ScheduledSequence, tokens: list[int]) -> tuple[int, End | None]:
        """Follow the constraint. How many tokens there are up to its end, and this end, if it ends the output."""
        if (grammar := wording.grammar_of(seq.constraint)) is None:
            return len(tokens), None
        for k, token in enumerate(tokens):
            if not grammar.consume(token):
                return k, EngineError(f"vLLM gave token {token}, which the constraint does not allow")
            if grammar.finished:
                return k + 1, _SATISFIED
        return len(tokens), None

    def _extras(self, seq: ScheduledSequence, tokens: list[int], found: list[Any] | None) -> Extras | None:
        sampling = seq.request.sampling
        if sampling.logprobs is None or found is None:
            return None
        named = dict.fromkeys(sampling.logprob_token_ids, 0)
        return Extras(
            [
                wording.scored(token, entries, named, sampling.logprobs)
                for token, entries in zip(tokens, found, strict=False)
            ]
        )

    def _score(self, seq: ScheduledSequence, found: list[Any]) -> None:
        top = seq.request.sampling.prompt_logprobs or 0
        prompt = seq.prompt.tolist()
        entries = [
            wording.scored(token, position, {}, top)
            for token, position in zip(prompt[seq.scored :], found[seq.scored :], strict=False)
        ]
        seq.scored = seq.num_input_tokens
        self.emissions.append(PromptScored(seq, entries))


def _end_of(seq: ScheduledSequence, grammar: ConstraintState) -> Finish:
    """How the constrained output ended that a sequence resumes."""
    if (end := seq.rules.cut((), seq.generated)[1]) is not None:
        return end
    if grammar.finished:
        return _SATISFIED
    return Finish(FinishReason.DEADLINE) if seq.output.stop is None else Finish(FinishReason.STOP, seq.output.stop)


def _error_of(seq: ScheduledSequence, failed: str, text: str) -> Exception:
    match failed:
        case "request":
            return InvalidRequest("request", "must be one that vLLM takes", text)
        case "adapter":
            return AdapterError(f"adapter {seq.request.adapter}: vLLM cannot load it: {text}")
        case _:
            return EngineError(f"vLLM failed: {text}")
