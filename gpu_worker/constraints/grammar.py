"""JSON schemas, regular expressions, choices and Lark grammars, by llguidance.

A constraint is compiled to a grammar, and the grammar to a matcher whose automata are built lazily. Both are
cached per tokenizer. The next request with the same constraint starts from a copy (a microsecond) that shares the
automata built so far. A grammar that has failed is not reused.

A preparation thread compiles the grammar and computes the first mask. Most constraints that are too complex fail
there, so they are refused before the request is accepted. The library recurses while it compiles, as deep as rules
lead to rules: it needs a large stack.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Generic, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import xxhash
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request.protocols import ConstraintState, Int32Array, set_bits
from petiole.gpu_worker.text import Tokenizer

MOST = 64
MOST_CHARACTERS = 2 * 2**20
"""The length of all texts that the values were made of: a compiled grammar takes up to some 400 bytes a
character."""

STACK_BYTES = 256 * 2**20
"""For compiling: enough for as many rules as a constraint of the maximum size has."""

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """The values that were used last: at most `MOST`, of at most `MOST_CHARACTERS`. Thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def keep(self, key: K, value: V, characters: int) -> None:
        with self._lock:
            self._characters += characters - self._values.pop(key, (value, 0))[1]
            self._values[key] = value, characters
            while len(self._values) > MOST or self._characters > MOST_CHARACTERS:
                _, (_, left) = self._values.popitem(last=False)
                self._characters -= left


@dataclass(frozen=True)
class VocabularyDescription:
    """What a `Vocabulary` is made of, as JSON's own types. `text`: the tokenizer's, in the format of
    tokenizer.json; `added`: its added tokens, with their ids."""

    size: int
    eos: list[int]
    text: str
    added: list[tuple[str, int]]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        size = tokenizer.vocab_size
        added = tokenizer.backend.get_added_tokens_decoder()
        return cls(
            size,
            sorted(v for v in tokenizer.eos_token_ids if v < size),
            tokenizer.backend.to_str(),
            [(token.content, v) for v, token in added.items()],
        )


class Vocabulary:
    """A tokenizer in llguidance's format, and its compiled grammars. Thread-safe; created once per tokenizer.

    `special`: the added tokens, with their ids, that the library takes for special: no text in a grammar stands
    for them. They are more than those that the tokenizer calls special. `key`: equal for equal tokenizers."""

    def __init__(self, described: VocabularyDescription) -> None:
        self.size, self.eos = described.size, described.eos
        self.words = -(-self.size // 32)
        self.key = xxhash.xxh3_128_hexdigest(repr(described).encode())
        if not self.eos:
            raise InvalidRequest("constraint", "needs a model with an EOS token", "none")
        try:
            self.tokenizer = LLTokenizer(described.text, eos_token=self.eos)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises nothing narrower, and its panic is no Exception
            raise InvalidRequest("constraint", f"not possible with this model's tokenizer: {error}", "") from error
        self.special = frozenset((text, v) for text, v in described.added if self.tokenizer.is_special_token(v))
        self.proofs: LRUCache[tuple[str, str], str | InvalidRequest] = LRUCache()
        self._grammars: LRUCache[str, Grammar] = LRUCache()

    def grammar(self, source: str, field: str, value: object) -> Grammar:
        """The compiled grammar, from the cache if possible. Raises InvalidRequest for `field`."""
        kept = self._grammars.get(source)
        if kept is not None and not kept.failed:
            return kept
        made = Grammar(self, source, field, value)
        self._grammars.keep(source, made, len(source))
        return made


class Grammar:
    """A compiled constraint. `start()` creates initial states; the first state that fails sets `failed`."""

    def __init__(self, vocabulary: Vocabulary, source: str, field: str, value: object) -> None:
        self.vocabulary, self.source = vocabulary, source
        self.failed = False
        self._matcher = on_large_stack(
            lambda: LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=_limits())
        )
        matcher = self._matcher.deep_copy()
        if not matcher.is_error():
            _try_one_token(matcher, vocabulary)
        if matcher.is_error():
            raise InvalidRequest(field, _reason(matcher), value)

    def start(self) -> GrammarState:
        return GrammarState(self, self._matcher.deep_copy())


class GrammarState:
    """A position in an output that must match a grammar.

    The matcher stops when nothing can follow, and then rejects even EOS. Such EOS tokens are only counted, in
    `_after_end`.
    """

    __slots__ = ("_after_end", "_consumed", "_grammar", "_matcher")

    def __init__(self, grammar: Grammar, matcher: LLMatcher, consumed: int = 0, after_end: int = 0) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._consumed = consumed
        self._after_end = after_end

    @property
    def source(self) -> str:
        """The grammar, in llguidance's own format."""
        return self._grammar.source

    @property
    def finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fill_mask(self, out: Int32Array) -> None:
        vocabulary = self._grammar.vocabulary
        if self._matcher.is_stopped():
            self._check()
            set_bits(out, vocabulary.eos)
            return
        own = np.empty(vocabulary.words, np.int32)
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        self._write(own, out)

    def consume(self, token_id: int) -> bool:
        if self._matcher.is_stopped():
            self._check()
            if token_id not in self._grammar.vocabulary.eos:
                return False
            self._after_end += 1
            return True
        if not 0 <= token_id < self._grammar.vocabulary.size:
            return False
        n_consumed = int(self._matcher.try_consume_tokens([token_id]))
        if not n_consumed:
            self._check()  # the token was allowed, and took the matcher to one of its limits
        self._consumed += n_consumed
        return n_consumed == 1

    def rollback(self, n: int) -> None:
        assert 0 <= n <= self._consumed + self._after_end, "more than was consumed"
        counted = min(n, self._after_end)
        self._after_end -= counted
        if n > counted:
            self._consumed -= n - counted
            self._matcher.rollback(n - counted)

    def fork(self) -> Self:
        return type(self)(self._grammar, self._matcher.deep_copy(), self._consumed, self._after_end)

    def _write(self, own: Int32Array, out: Int32Array) -> None:
        """Copy a mask over the tokenizer's vocabulary to one over the model's, which may be larger or smaller."""
        self._check(own)
        shared = min(len(own), len(out))
        out[:shared] = own[:shared]
        out[shared:] = 0

    def _check(self, mask: Int32Array | None = None) -> None:
        """Raise InvalidRequest if the matcher has failed, or if no token of this vocabulary is allowed."""
        if self._matcher.is_error():
            self._grammar.failed = True
            raise InvalidRequest("constraint", _reason(self._matcher), f"after {self._consumed} tokens")
        if mask is not None and not mask.any():
            raise InvalidRequest(
                "constraint", "must leave a token that can follow", f"after {self._consumed} tokens"
            )


def fill_grammar_masks(states: Sequence[tuple[int, GrammarState]], out: Int32Array) -> None:
    """Fill rows of `out`, int32 [M, words], by their index, on several threads. All states have one tokenizer."""
    going = [(row, state) for row, state in states if not state.finished]
    together = len(going) > 1
    for row, state in states:
        if state.finished or not together:
            state.fill_mask(out[row])
    if not together:
        return
    words = going[0][1]._grammar.vocabulary.words
    own = np.empty((len(going), words), np.int32)
    pairs = [(state._matcher, k) for k, (_, state) in enumerate(going)]
    _executor().unsafe_compute_mask_ptr(pairs, own.ctypes.data, words * own.itemsize, len(going))
    for k, (row, state) in enumerate(going):
        state._write(own[k], out[row])


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer's vocabulary, made at its first constraint (about a second for 150,000 tokens)."""
    with _lock:
        found = _vocabularies.get(tokenizer)
        if found is None:
            found = _vocabularies[tokenizer] = Vocabulary(VocabularyDescription.of(tokenizer))
        return found


def on_large_stack(do: Callable[[], T]) -> T:
    """The result of `do`, on a thread of its own."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(do())
        except BaseException as error:
            done.set_exception(error)

    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="compiling", daemon=True).start()
        except RuntimeError as error:  # no memory for the stack
            raise MemoryError(str(error)) from error
        finally:
            threading.stack_size(usual)
    return done.result()


@cache
def _executor() -> LLExecutor:
    return LLExecutor()


def _try_one_token(matcher: LLMatcher, vocabulary: Vocabulary) -> None:
    """Advance by the first allowed token: some failures show only then."""
    mask = np.zeros(vocabulary.words, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    words = np.flatnonzero(mask)
    if len(words) and not matcher.is_stopped():
        word = int(words[0])
        bits = int(mask[word]) & 0xFFFFFFFF
        matcher.try_consume_tokens([32 * word + (bits & -bits).bit_length() - 1])


def _limits() -> LLParserLimits:
    """Limits because a mask delays its whole batch. The explored states of a grammar take 100 MB at most. Work
    grows with the square of the items. Ordinary schemas stay far below; a thousand properties that may be left
    out have 3,000 items in a row."""
    return LLParserLimits(
        step_lexer_fuel=50_000,
        max_lexer_states=50_000,
        max_items_in_row=4_000,
        step_max_items=20_000,
        verbose_errors=False,
    )


def _reason(matcher: LLMatcher) -> str:
    """llguidance's error message on one line, without its drawing of the source and its calls."""
    lines = [line.strip() for line in matcher.get_error().partition("<backtrace>")[0].splitlines()]
    said = " ".join(line for line in lines if line and not _DRAWING.match(line))
    if said == "NoExtensionBias":
        return _NOTHING_FOLLOWS
    if _TOO_WIDE.search(said):
        return _NARROWER
    return said


_TOO_WIDE = re.compile(r"Current row has|Too many items|grammar\.symbols\.len")
_NARROWER = (
    "must have fewer alternatives at one place: some 1,000 properties that may be left out, or 2,000 others"
)
_NOTHING_FOLLOWS = "no token can begin an output, or continue one (a rule that leads only to itself?)"
_DRAWING = re.compile(r"\d* *\||\^+$|<.*/?>$")
_lock, _starting = threading.Lock(), threading.Lock()
_vocabularies: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()


def fill_masks(states: Sequence[ConstraintState], out: Int32Array) -> None:
    """Fill `out`, int32 [len(states), words], with the mask of `states[k]` in row k. States are distinct."""
    grammars = []
    for row, state in enumerate(states):
        if isinstance(state, GrammarState):
            grammars.append((row, state))
        else:
            state.fill_mask(out[row])
    fill_grammar_masks(grammars, out)


def fill_draft_masks(state: ConstraintState, drafts: Sequence[int], out: Int32Array) -> int:
    """The masks of a verify: `out` int32 [len(drafts) + 1, words], row k for the position after `drafts[:k]`.

    Returns the number of leading drafts that the constraint allows. Rows after the first disallowed draft are not
    written, because that draft is always rejected; nor are those behind the constraint's end. Nor is the row of a
    place where nothing may come: the request fails when it gets there, and not if the drafts before are rejected.
    The state is restored.
    """
    n_consumed = 0
    try:
        state.fill_mask(out[0])
        for draft in drafts:
            if state.finished or not state.consume(draft):
                return n_consumed
            n_consumed += 1
            try:
                state.fill_mask(out[n_consumed])
            except InvalidRequest:
                out[n_consumed] = 0
                return n_consumed
        return n_consumed
    finally:
        state.rollback(n_consumed)
