"""The output of one request: made with the request, filled by the text thread, which detokenizes into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from petiole.gpu_worker.request import FinishReason, TokenLogprobs
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.request.pooling import Made, Pooled
from petiole.gpu_worker.request.protocols import PositionalSkill, SkillState
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Extras
from petiole.gpu_worker.scheduling.stopping import End, Finish, StopRules
from petiole.gpu_worker.text import TextAssembler, Tokenizer, TokenTexts


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
        self.answer_name: str | None = None
        self.spelling: TokenTexts | None = None

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
        answer_name: str | None = None,
    ) -> None:
        """Set up detokenization and replay the tokens of an earlier attempt, whose text was delivered already.
        `reading`: reads a skill's answer from what follows. `write`: makes the vector or the scores that are
        delivered. `answer_name`: what a skill's answer is called that is the text.

        Runs on a preparation thread.
        """
        request, self.reading, self.write = self.handle.request, reading, write
        self.answer_name = answer_name
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
                self.spelling = TokenTexts(tokenizer, **visible)
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

    def answer(self) -> Any:
        """A skill's answer to the whole output."""
        if self.answer_name is not None:
            return {self.answer_name: "".join(self.texts)}
        return None if self.reading is None else self.reading.finalize()

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


def _is_terminal(end: End | None) -> bool:
    """Whether the output ended with EOS or a stop token."""
    if not isinstance(end, Finish) or end.reason is not FinishReason.STOP:
        return False
    return end.stop_reason == "eos" or isinstance(end.stop_reason, int)
