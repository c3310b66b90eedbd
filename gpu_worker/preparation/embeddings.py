"""Requests for embeddings, scores and classes: checked by what the model does, and tokenized.

             texts of vectors      a classifier's texts     a model that generates
vectors      pooled, and written   refused                  refused
one score    refused               its head, on a pair      a question, answered by yes or no
classes      refused               its head, on either      refused
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from petiole.contract.results.outputs import Prepared
from petiole.contract.results.vectors import COLBERT, FIELDS, MOST_TEXTS
from petiole.gpu_worker.exceptions import EngineError, InvalidRequest, ModelChanged, require
from petiole.gpu_worker.preparation import pairs
from petiole.gpu_worker.preparation.pairs import Tokens
from petiole.gpu_worker.preparation.prompts import no_tokenizer
from petiole.gpu_worker.preparation.tokens import at_most
from petiole.gpu_worker.request import Embedding, Request, Result, SamplingParams, Scoring
from petiole.gpu_worker.request.pooling import MOST_INSTRUCTION, Made, Pooled, TextLimits
from petiole.gpu_worker.request.requests import check_text
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.text import Tokenizer

ONE = SamplingParams(max_tokens=1, temperature=0.0)
"""A vector takes the place of one token."""
YES, NO = "yes", "no"


@dataclass(frozen=True, slots=True)
class TextInputs:
    """A prepared request of texts. tokens: of each text, with its prompt; done: texts that an earlier attempt has
    delivered, which are not among these. sampling: of each text. made: what a text's result says of it; None if
    it has ended before. answer: further fields of the whole result. alike: the texts begin alike, so the first is
    computed before the others, which find its beginning in the prefix cache."""

    tokens: Sequence[Tokens]
    done: int
    prepared: Prepared
    sampling: SamplingParams
    made: Callable[[Result], Made | None]
    answer: Mapping[str, Any]
    alike: bool = False


def changed(n_texts: int, begun_with: str, served: str) -> str:
    """The message of a ModelChanged."""
    return f"{n_texts} texts were answered by model {begun_with}, and model {served} is served now"


@dataclass(frozen=True, slots=True)
class TextRequests:
    """Requests of texts to one model. Each method raises InvalidRequest."""

    limits: ModelLimits
    tokenizer: Tokenizer | None

    def check_kind(self, request: Request) -> None:
        """Check that the model does what is asked of it."""
        model, texts = self.limits.model, self.limits.texts
        field = next((name for name in ("prompt", "messages", "texts") if getattr(request, name) is not None), "")
        scoring = request.scoring
        if scoring is not None:
            field = field if request.texts is None else scoring.field
        wanted = "classes" if scoring and scoring.classes else "scores" if scoring else "vectors"
        if texts is None:
            if not request.pooled and request.texts is None:
                return
            able = scoring is not None and not scoring.classes and self.limits.processor is None
            does = "generates, and has no classes" if scoring else "generates, and makes no vectors"
            require(able, field, f"the model {model} {does}: {_ASKS[wanted]} needs another", wanted)
        elif texts.labels:
            does = f"gives scores to texts, by {len(texts.labels)} labels"
            limit = f"the model {model} {does}, and nothing else: score, rerank and classify ask for them"
            require(scoring is not None, field, limit, wanted if request.pooled else f"a {field}")
        else:
            limit = f"the model {model} makes vectors of texts, and generates nothing: embed asks for them"
            asked = scoring is None and (request.pooled or request.texts is not None)
            require(asked, field, limit, wanted if scoring else f"a {field}")

    def writer(self, request: Request, ids: Sequence[int]) -> Callable[[Pooled], Made] | None:
        """Makes what is delivered of a text; None for a model that generates. ids: the text's tokens."""
        limits = self.limits.texts
        if limits is None or not request.pooled:
            return None
        if request.scoring is not None:
            limits.check_scoring(request.scoring, 1)
            return limits.scored
        asked = request.embedding or Embedding()
        limits.check(asked, 1)
        special = frozenset[int]() if self.tokenizer is None else self.tokenizer.special_token_ids
        return partial(limits.written, asked=asked, ids=ids, special=special)

    def inputs(self, request: Request) -> TextInputs:
        """The texts of a request, but for those that an earlier attempt has delivered.

        Also raises ModelChanged."""
        self.check_kind(request)
        given = [name for name in ("prompt", "messages", "skill") if getattr(request, name) is not None]
        require(not given, given[0] if given else "", "must not be given with texts", "both")
        texts, scoring, limits = request.texts, request.scoring, self.limits.texts
        field = "texts" if scoring is None else scoring.field
        listed = isinstance(texts, Sequence) and not isinstance(texts, str)
        require(listed, field, "must be a list of texts", texts)
        texts = list(texts or ())
        require(len(texts) > 0, field, "must not be empty", "0 texts")
        done = len(request.resume_token_ids)
        require(done <= len(texts), "resume_token_ids", f"must have at most {len(texts)} texts", done)
        begun_with, served = request.resume_fingerprint, self.limits.fingerprint
        if done and begun_with is not None and begun_with != served:
            raise ModelChanged(changed(done, begun_with, served))
        if self.tokenizer is None:
            raise no_tokenizer(field)
        sampling, answer = ONE, dict[str, object](fingerprint=served)
        made: Callable[[Result], Made | None] = _of_head
        if scoring is None:
            asked = request.embedding or Embedding()
            assert limits is not None, "a model of vectors"
            limits.check(asked, len(texts))
            answer |= {"dimensions": limits.dimensions_of(asked), "encoding": asked.encoding}
            if COLBERT in asked.outputs:
                answer["token_dimensions"] = limits.of_tokens[COLBERT]
            encode: Callable[[str, object], Tokens] = partial(self._text, limits, limits.prompt(asked), asked)
        elif limits is not None:
            limits.check_scoring(scoring, len(texts))
            if scoring.classes:
                answer["labels"] = list(limits.labels)
            encode = partial(self._classified, limits, scoring)
        else:
            require(len(texts) <= MOST_TEXTS, field, f"must be at most {MOST_TEXTS}", len(texts))
            sampling, made = self._yes_or_no(field)
            encode = partial(self._asked, scoring)
        tokens = [encode(f"{field}[{k}]", text) for k, text in enumerate(texts) if k >= done]
        if limits is not None and scoring is None:
            counts = [*request.resume_token_ids, *(len(one.ids) for one in tokens)]
            limits.check_size(request.embedding or Embedding(), [int(n) for n in counts])
        n_tokens = sum(request.resume_token_ids) + sum(len(one.ids) for one in tokens)
        return TextInputs(
            tokens,
            done,
            Prepared(self.limits.model, self.limits.fingerprint, n_tokens, ""),
            sampling=sampling,
            made=made,
            answer=answer,
            alike=scoring is not None and limits is None,
        )

    # ------------------------------------------------------------ tokens

    def _text(
        self, limits: TextLimits, prompt: str, asked: Embedding | Scoring, field: str, text: object
    ) -> Tokens:
        assert self.tokenizer is not None
        whole = check_text(field, text)
        require(whole != "", field, "must not be empty", "an empty string")
        whole = _lowered(limits, prompt + whole)
        special = not isinstance(asked, Embedding) or asked.add_special_tokens
        cutting = self.tokenizer.encode_cut if asked.truncate else self.tokenizer.encode
        encode = partial(cutting, add_special_tokens=special)
        ids = encode(whole, field=field, max_tokens=at_most(asked.truncate_to, limits.max_tokens))
        require(len(ids) > 0, field, "must have a token", "none")
        if limits.pools_prompts or not prompt:
            return Tokens(ids)
        alone = self.tokenizer.encode(
            _lowered(limits, prompt),
            field="prompt_name",
            add_special_tokens=special,
            max_tokens=limits.max_tokens,
        )
        ends = bool(alone) and alone[-1] in self.tokenizer.special_token_ids  # as sentence-transformers counts
        return Tokens(ids, prompt=len(alone) - ends)

    def _classified(self, limits: TextLimits, scoring: Scoring, field: str, text: object) -> Tokens:
        if not isinstance(text, tuple | list):
            require(scoring.classes, field, "must be a pair of texts", "one text")
            return self._text(limits, "", scoring, field, text)
        assert self.tokenizer is not None
        pair, most = _pair(field, text), at_most(scoring.truncate_to, limits.max_tokens)
        if not limits.whole:
            return pairs.asked(
                self.tokenizer, pair, scoring.instruction, field=field, max_tokens=most, truncate=scoring.truncate
            )
        pair = _lowered(limits, pair[0]), _lowered(limits, pair[1])
        tokens = pairs.joined(self.tokenizer, pair, field=field, max_tokens=most, truncate=scoring.truncate)
        return tokens if limits.types else Tokens(tokens.ids)

    def _asked(self, scoring: Scoring, field: str, text: object) -> Tokens:
        assert self.tokenizer is not None
        if scoring.instruction is not None:
            length = len(check_text("instruction", scoring.instruction))
            limit = f"must have at most {MOST_INSTRUCTION} characters"
            require(length <= MOST_INSTRUCTION, "instruction", limit, length)
        judge = self.limits.judge
        return pairs.asked(
            self.tokenizer,
            _pair(field, text),
            judge.instruction if judge is not None and scoring.instruction is None else scoring.instruction,
            field=field,
            max_tokens=at_most(scoring.truncate_to, self.limits.max_model_len - 1),
            truncate=scoring.truncate,
        )

    def _yes_or_no(self, field: str) -> tuple[SamplingParams, Callable[[Result], Made | None]]:
        """How a model that generates is asked, and its score: as its files say, or the probability of "yes" if
        it may say nothing but "yes" or "no"."""
        assert self.tokenizer is not None
        judge = self.limits.judge
        if judge is None:
            yes, no = (self.tokenizer.backend.token_to_id(word) for word in (YES, NO))
        else:
            yes, no = judge.yes, judge.no
        known = yes is not None and no is not None and max(yes, no) < self.limits.vocab_size
        model = f"must be for a model with the tokens {YES!r} and {NO!r}"
        if yes is None or no is None or not known:
            raise InvalidRequest(field, model, f"{self.limits.model}, which lacks one")
        sampling = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=[no, yes], logprobs=2)
        return sampling, partial(_share_of, yes, no, judge is None or judge.sigmoid)


def _lowered(limits: TextLimits, text: str) -> str:
    """In lower case, if the model's files ask for that: its prompt, too, as sentence-transformers has it."""
    return text.lower() if limits.lower_case else text


def _of_head(result: Result) -> Made | None:
    """What a model of texts has made of a text; None if it has ended before."""
    made = {name: getattr(result, name) for name in (*FIELDS.values(), "scores")}
    return {name: some[0] for name, some in made.items() if some} or None


def _share_of(yes: int, no: int, share: bool, result: Result) -> Made | None:
    """The probability of "yes" if nothing but "yes" or "no" may be said; or the difference of their logits,
    which is that of their log-probabilities."""
    if not result.logprobs:
        return None
    found = dict(result.logprobs[0].top)
    one, other = found.get(yes, -math.inf), found.get(no, -math.inf)
    score = math.exp(one) if share else one - other
    if math.isnan(one) or not math.isfinite(score):
        raise EngineError("the model made scores that are not finite numbers")
    return {"scores": (score,)}


def _pair(field: str, given: object) -> tuple[str, str]:
    pair = tuple(given) if isinstance(given, tuple | list) else ()
    if len(pair) != 2:
        what = "one text" if isinstance(given, str) else f"{len(pair)} texts"
        raise InvalidRequest(field, "must be a pair of texts", what)
    for k, text in enumerate(pair):
        require(check_text(f"{field}[{k}]", text) != "", f"{field}[{k}]", "must not be empty", "an empty string")
    return pair


_ASKS = {"vectors": "embed", "scores": "score", "classes": "classify"}
