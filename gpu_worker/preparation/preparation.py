"""Prepares requests: validates and tokenizes a request and builds its sequence.

Runs on preparation threads. Invalid requests are rejected here, with the field, the limit and the value, at no
cost to the engine thread. `tasks` does not know the model's own limits: vocabulary, context, pages, chat
template. They are checked here. For callers without `tasks`, each option is checked by its declaration in
`petiole.contract`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import xxhash

from petiole.contract import limits
from petiole.contract.requests import sampling
from petiole.contract.requests.validation import Declared, validate
from petiole.contract.results.outputs import Prepared
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.constraints import BannedState, Bans, ConstraintState, SkillConstraint, spellings
from petiole.gpu_worker.constraints.calls import shortest
from petiole.gpu_worker.exceptions import AdapterChanged, InvalidRequest, require
from petiole.gpu_worker.preparation.embeddings import TextInputs, TextRequests
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.preparation.prompts import PromptInputs, PromptReader, Reading, no_tokenizer
from petiole.gpu_worker.preparation.tokens import (
    InputTokens,
    check_fits,
    check_output,
    check_prompt,
    check_scores,
    context_of,
    resumed_tokens,
)
from petiole.gpu_worker.request import Constraint, Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import IMAGE, check_images
from petiole.gpu_worker.request.requests import check_token_ids, is_token_id
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.scheduled_sequence import (
    Arrival,
    Followers,
    Resolved,
    ScheduledSequence,
    SequenceInputs,
)
from petiole.gpu_worker.scheduling.stopping import StopRules
from petiole.gpu_worker.speculation import Drafter, Proposer
from petiole.gpu_worker.text import Tokenizer

ConstraintCompiler = Callable[[Constraint], ConstraintState]

PROMPT_END = 32
"""Tokens of a prompt's end that a reader of the output needs: it may leave a `<think>` open, say."""
MOST_COUNTED = 4_000_000
"""Tokens of a prompt that is only counted."""
MOST_BANNED = 2**14
"""Tokens of bad words: each has a place in a tree."""

_CLOSING = 8
"""Tokens that a thought may take beyond its budget and its marks: a character's last bytes, and spaces."""
_SEED_RANGE = 1 << 64


class Preparer:
    """Builds sequences within the model's limits. Keeps no state of requests. Thread-safe.

    `adapter_key` is the runtime's. Without a tokenizer, prompts must be token ids, and a constraint must be a
    `ConstraintState`. `sequence`: the class of sequences.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        *,
        tokenizer: Tokenizer | None,
        compile_constraint: ConstraintCompiler | None,
        proposer: Proposer,
        adapter_key: Callable[[str], str],
        sequence: type[ScheduledSequence] = ScheduledSequence,
    ) -> None:
        self.config = config
        self.limits = limits
        self.tokenizer = tokenizer
        self.compile_constraint = compile_constraint
        self.proposer = proposer
        self.adapter_key = adapter_key
        self.sequence = sequence

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The EOS tokens of the model and of the tokenizer. A reload may change both."""
        return self.limits.eos_token_ids | (self.tokenizer.eos_token_ids if self.tokenizer else frozenset())

    def prepare(self, output: RequestOutput, arrival: int, arrival_s: float) -> ScheduledSequence:
        """The sequence of a request. Raises InvalidRequest, or AdapterError."""
        request = output.handle.request
        check_declared(request)
        self.text_requests.check_kind(request)
        subject = self._subject(request)
        request, given, resumed = subject.request, subject.prompt, self._resumed(request)
        prompt = given.ids
        check_tokens(request.sampling, self.limits.vocab_size)
        request, bans = self._banning(request)
        check_output(request, len(resumed.ids), self.limits)
        self._check_adapter(request)
        check_scores(request, given, self.limits)
        context = context_of(request, given, self.limits)
        rules = StopRules.of(request.sampling, self.eos_token_ids, len(prompt), context)
        check_min_tokens(request.sampling, rules.end_ids, self.limits.vocab_size)
        check_fits(len(prompt), rules.max_output_tokens, self.limits)
        constraint, tokenizer = self._constraint(request, given, resumed, bans), self._text_tokenizer(request)
        tokenizer = tokenizer if subject.has_text and not request.pooled else None
        words = [token for token in prompt if token != IMAGE]
        reading, writer = self._reading(subject, resumed), self.text_requests.writer(request, words)
        output.open(tokenizer, words, rules, reading, writer, answer_name=subject.answer)
        numbers = given.numbers | {len(prompt) + at: numbers for at, numbers in resumed.numbers.items()}
        drafter = None if given.images else self._drafter(request, prompt)
        return self.sequence(
            request,
            SequenceInputs(prompt, numbers, given.images, self.limits.values, self.limits.images, self._whole),
            rules,
            arrival=Arrival(arrival, arrival_s),
            resolved=Resolved(resolve_seed(request), self._adapter_key(request)),
            followers=Followers(constraint, drafter, output),
            max_outstanding=1 if self.config.pipeline == "off" else 2,
            keeps_state=self.limits.snapshots > 0,
            goes_ahead=self.limits.goes_ahead,
        )

    def texts(self, request: Request) -> TextInputs:
        """The texts of a request that has some. Raises InvalidRequest."""
        return self.text_requests.inputs(request)

    @property
    def text_requests(self) -> TextRequests:
        return TextRequests(self.limits, self.tokenizer)

    @property
    def _whole(self) -> bool:
        return self.limits.texts is not None and self.limits.texts.whole

    def described(self, seq: ScheduledSequence) -> Prepared:
        """What is known of a prepared request."""
        end = [token for token in seq.prompt[-PROMPT_END:].tolist() if token != IMAGE]
        text = "" if self.tokenizer is None else self.tokenizer.decode(end, skip_special_tokens=False)
        return Prepared(self.limits.model, self.limits.fingerprint, seq.num_input_tokens, text)

    def tokens_of(self, request: Request) -> list[int]:
        """See `Engine.tokens_of`."""
        limits = replace(self.limits, max_model_len=MOST_COUNTED + 1)
        subject = PromptReader(self.config, limits, self.tokenizer, self.eos_token_ids).of(request)
        check_images(subject.prompt.images, subject.prompt.n_images, limits.images)
        return subject.prompt.ids

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Engine.text_of`."""
        if self.tokenizer is None:
            raise no_tokenizer("token_ids")
        ids = check_token_ids("token_ids", token_ids, self.limits.vocab_size)
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def entries_of(self, token_ids: Sequence[int]) -> list[str]:
        """See `Engine.entries_of`."""
        if self.tokenizer is None:
            raise no_tokenizer("token_ids")
        return [*map(self.tokenizer.entry, token_ids)]

    def text_lengths(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """See `Engine.text_lengths`."""
        if self.tokenizer is None:
            raise no_tokenizer("token_ids")
        skips = request.sampling.skip_special_tokens
        return self.tokenizer.text_lengths(token_ids, skip_special_tokens=skips, shown=request.shown_tokens)

    # ------------------------------------------------------------ parts

    def _subject(self, request: Request) -> PromptInputs:
        subject = PromptReader(self.config, self.limits, self.tokenizer, self.eos_token_ids).of(request)
        tokens, field = subject.prompt.ids, subject.field
        check_images(subject.prompt.images, subject.prompt.n_images, self.limits.images)
        check_prompt(subject.prompt, field, self.limits)
        last = self.limits.vocab_size - 1  # a tokenizer may have tokens that the model never learnt
        require(max(tokens) <= last, field, f"must have only tokens of the model, 0 to {last}", max(tokens))
        return subject

    def _reading(self, subject: PromptInputs, resumed: InputTokens) -> Reading | None:
        """The state that reads a skill's answer, after replaying the tokens that earlier attempts have
        delivered."""
        if subject.reading is None:
            return None
        values, reading = self.limits.values, subject.reading.fork()
        for position, token in enumerate(resumed.ids):
            numbers = resumed.numbers.get(position, ())
            reading.consume_step(token, () if values is None else values.shown(token, numbers))
        return reading

    def _resumed(self, request: Request) -> InputTokens:
        limits = self.limits
        return resumed_tokens(request.resume_token_ids, request.resume_bins, limits.vocab_size, limits.values)

    def _check_adapter(self, request: Request) -> None:
        if request.adapter is not None:
            slots = "this engine has no adapter slots (PETIOLE_LORA_SLOTS is 0)"
            require(self.config.lora_slots > 0, "adapter", slots, request.adapter)

    def _banning(self, request: Request) -> tuple[Request, Bans | None]:
        """The request with its bad words of one token among the banned tokens, and the longer ones."""
        sampling = request.sampling
        if not (words := sampling.bad_words):
            return request, None
        if self.tokenizer is None:
            raise no_tokenizer("bad_words")
        found = spellings(words, self.tokenizer, self.limits.vocab_size)
        in_all = sum(map(len, found))
        limit = f"must have at most {MOST_BANNED} tokens in all, with a space before each word and without"
        require(in_all <= MOST_BANNED, "bad_words", limit, in_all)
        single = sorted(tokens[0] for tokens in found if len(tokens) == 1)
        sampling = replace(sampling, banned_token_ids=[*sampling.banned_token_ids, *single])
        check_tokens(sampling, self.limits.vocab_size)
        longer = frozenset(tokens for tokens in found if len(tokens) > 1)
        return replace(request, sampling=sampling), Bans(longer, self.limits.vocab_size) if longer else None

    def _constraint(
        self, request: Request, given: InputTokens, resumed: InputTokens, bans: Bans | None
    ) -> ConstraintState | None:
        state = request.constraint if not isinstance(request.constraint, Constraint) else None
        if isinstance(request.constraint, Constraint):
            compiler = self.compile_constraint
            require(compiler is not None, "constraint", "needs a tokenizer", request.constraint.kind)
            constraint = self._with_room(request, given, self._after(given.ids, request.constraint))
            state = cast(ConstraintCompiler, compiler)(constraint)
        if bans is not None:
            require(not isinstance(state, SkillConstraint), "bad_words", "must be empty: a skill decides", "some")
            state = BannedState(bans, state)
        if state is None:
            return None
        for position, token in enumerate(resumed.ids):
            if not state.finished and not self._consume(state, token, resumed.numbers.get(position, ())):
                raise InvalidRequest(f"resume_token_ids[{position}]", "must match the constraint", token)
        return state

    def _after(self, prompt: Sequence[int], constraint: Constraint) -> Constraint:
        """A constraint with calls says whether the prompt has begun a thought, or ended it."""
        if constraint.kind != "calls" or not isinstance(constraint.value, Mapping):
            return constraint
        thought = constraint.value.get("thought")
        end = self._end_of(prompt).rstrip()
        thinks = "free"
        if thought and end.endswith(thought["open"].rstrip()):
            thinks = "open"
        elif thought and end.endswith(thought["close"].rstrip()):
            thinks = "closed"
        if thinks != "open" and not constraint.value.get("calls") and not constraint.value.get("free"):
            thinks = "closed"  # an answer alone has a thought before it only if the prompt has begun one
        return replace(constraint, value={**constraint.value, "thinks": thinks})

    def _with_room(self, request: Request, given: InputTokens, constraint: Constraint) -> Constraint:
        """Where a call must come, its shortest form must fit into `max_tokens`. A thought before it leaves room
        for twice as many tokens, or does not come."""
        value = constraint.value
        if constraint.kind != "calls" or not isinstance(value, Mapping) or not value.get("least"):
            return constraint
        if self.tokenizer is None or not value.get("calls"):
            return constraint
        limit = request.sampling.max_tokens
        most = context_of(request, given, self.limits) - len(given.ids) if limit == "rest" else limit
        call = len(self.tokenizer.encode(shortest(value), add_special_tokens=False))
        require(most >= call, "max_tokens", f"must be at least {call}, the tokens of the shortest call", most)
        return self._with_budget(constraint, value, most, call)

    def _with_budget(self, constraint: Constraint, value: Mapping[str, Any], most: int, call: int) -> Constraint:
        """Limit the thought before a call of `call` tokens, of `most` tokens in all."""
        assert self.tokenizer is not None
        thought = value.get("thought")
        if not thought or value["thinks"] == "closed":
            return constraint
        marks = thought["close"] + thought.get("after", "")
        marks += thought["open"] if value["thinks"] == "free" else ""
        room = most - 2 * call - len(self.tokenizer.encode(marks, add_special_tokens=False)) - _CLOSING
        asked = value.get("budget")
        budget = room if asked is None else min(asked, room)
        if budget <= 0 and value["thinks"] == "free":
            return replace(constraint, value={**value, "thinks": "closed"})
        return replace(constraint, value={**value, "budget": max(0, budget), "free": False})

    def _end_of(self, prompt: Sequence[int]) -> str:
        """The text of the last tokens of a prompt."""
        end = [token for token in prompt[-PROMPT_END:] if token != IMAGE]
        return "" if self.tokenizer is None else self.tokenizer.decode(end, skip_special_tokens=False)

    def _consume(self, state: ConstraintState, token: int, numbers: Numbers) -> bool:
        if not isinstance(state, SkillConstraint):
            return state.consume(token)
        values = self.limits.values
        return state.consume(token, () if values is None else values.shown(token, numbers))

    def _drafter(self, request: Request, prompt: Sequence[int]) -> Drafter | None:
        if self.config.speculative_tokens == 0 or self.limits.values is not None or request.pooled:
            return None  # a draft is a token id without numbers, and this model may need some
        return self.proposer.drafter([*prompt, *request.resume_token_ids])

    def _adapter_key(self, request: Request) -> str | None:
        if request.adapter is None:
            return None
        key, begun_with = self.adapter_key(request.adapter), request.resume_adapter_key
        if begun_with is not None and begun_with != key:
            tokens = len(request.resume_token_ids)
            raise AdapterChanged(
                f"{tokens} tokens were generated with adapter {request.adapter}, whose content is no longer "
                f"{begun_with} but {key}"
            )
        return key

    def _text_tokenizer(self, request: Request) -> Tokenizer | None:
        if request.sampling.stop and self.tokenizer is None:
            raise no_tokenizer("stop")
        return self.tokenizer


def resolve_seed(request: Request) -> int:
    """The request's own seed, or one that follows from the request's id. So a redelivered request draws the same
    tokens."""
    seed = request.sampling.seed
    return xxhash.xxh64_intdigest(request.request_id.encode()) if seed is None else seed % _SEED_RANGE


class _Declared(Declared):
    """The options of a request beside its sampling that have limits of their own."""

    priority: int
    deadline_s: limits.DeadlineS | None
    salt: str
    adapter: str | None
    continue_final_message: bool


def check_declared(request: Request) -> None:
    """Check every option by its own declaration. Raises InvalidRequest."""
    validate(_Declared, {name: getattr(request, name) for name in _Declared.model_fields})
    sampling.check(request.sampling)


def check_min_tokens(sampling: SamplingParams, end_ids: Collection[int], vocab_size: int) -> None:
    """Check that a token is left to draw before the output may end. Raises InvalidRequest."""
    low = sampling.min_tokens
    allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    excluded = {*sampling.banned_token_ids, *end_ids}
    left = low == 0 or not excluded.issuperset(allowed)
    require(left, "min_tokens", "must be 0 if every token that may be drawn ends the output", low)


def check_tokens(sampling: SamplingParams, vocab_size: int) -> None:
    """Check what the vocabulary limits. Raises InvalidRequest."""
    for name in ("logprobs", "prompt_logprobs"):
        limit = f"must be at most the size of the vocabulary, {vocab_size}"
        require((getattr(sampling, name) or 0) <= vocab_size, name, limit, getattr(sampling, name))
    for token in sampling.logit_bias:
        limit = f"must have token ids from 0 to {vocab_size - 1} as keys"
        require(is_token_id(token, vocab_size), "logit_bias", limit, token)
    banned = set(check_token_ids("banned_token_ids", sampling.banned_token_ids, vocab_size))
    require(len(banned) < vocab_size, "banned_token_ids", "must leave a token", f"all {vocab_size}")
    if sampling.allowed_token_ids is not None:
        allowed = check_token_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
        require(bool(set(allowed) - banned), "allowed_token_ids", "must leave a token that is not banned", allowed)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    named = check_token_ids("logprob_token_ids", sampling.logprob_token_ids, vocab_size)
    require(len(named) <= vocab_size, "logprob_token_ids", f"must have at most {vocab_size} entries", len(named))
    for i, ids in enumerate(sampling.stop_token_sequences):
        check_token_ids(f"stop_token_sequences[{i}]", ids, vocab_size)
