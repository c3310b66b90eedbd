"""Detokenization and stop strings of one output.

The text and the stop decision depend only on the token sequence, not on how it is divided into pushes. A resumed
request replays the tokens that have been delivered already and continues from there.

The stop string that *ends* first wins. Of several that end at the same character, the longest wins. So the result
never depends on text that follows the match. The longest suffix that is a prefix of a stop string is held back.
An Aho-Corasick automaton gives both: the depth of its state is the length of the text held back, and its output is
the match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from petiole.contract.results.outputs import TokenLogprobs
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """The result of a push. `stop`: the stop string that ended the output, or None. `n_tokens`: the number of
    pushed tokens that belong to the output, up to and including the one that completed the stop string."""

    text: str
    stop: str | None
    n_tokens: int


class TextAssembler:
    """The text of one output. Owned by one thread. `before`: the tokens before the output, whose text it
    continues.

    With `include_stop`, the text ends with the stop string; otherwise it ends before the stop string. The text of
    the first `min_tokens` tokens completes no stop string, but may begin one. `shown`: special tokens that yield
    text even if the others do not.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "_n_tokens")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skip_special_tokens, shown=shown, before=before
        )
        self._matcher = StopMatcher(automaton_of(tuple(stop)), include_stop=include_stop) if stop else None
        self._min_tokens = min_tokens
        self._n_tokens = 0  # counted only if there are stop strings

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the output, or None."""
        return self._matcher.stop if self._matcher else None

    @property
    def _may_stop(self) -> bool:
        return self._n_tokens > self._min_tokens

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Append tokens. Tokens after a stop string are ignored."""
        matcher = self._matcher
        if matcher is None:
            return TextPiece(self._detokenizer.push(token_ids), None, len(token_ids))
        if matcher.stop is not None:
            return TextPiece("", matcher.stop, 0)
        texts = []
        for k, token_id in enumerate(token_ids):
            self._n_tokens += 1
            text = self._detokenizer.push((token_id,))
            if text:
                texts.append(matcher.push(text, self._may_stop))
                if matcher.stop is not None:
                    return TextPiece("".join(texts), matcher.stop, k + 1)
        return TextPiece("".join(texts), None, len(token_ids))

    def flush(self) -> str:
        """Return the text held back, at the end of the output; empty after a stop string."""
        if self._matcher is None:
            return self._detokenizer.flush()
        if self._matcher.stop is not None:
            return ""
        text = self._matcher.push(self._detokenizer.flush(), self._may_stop)
        return text + self._matcher.flush() if self._matcher.stop is None else text


class TokenTexts:
    """The texts of an output's tokens, one by one, and where each of them is. Owned by one thread. The arguments
    are those of `TextAssembler`."""

    __slots__ = ("_detokenizer", "_length", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[str] = (),
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skip_special_tokens, shown=shown, before=before
        )
        self._length = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        self._length += len(self._detokenizer.push(token_ids))

    def of(self, entry: TokenLogprobs) -> TokenLogprobs:
        """Append a token. The same entry with the texts and the bytes of its tokens, and its length."""
        self.push((entry.token_id,))
        return replace(self.of_prompt(entry), length=self._length)

    def of_prompt(self, entry: TokenLogprobs) -> TokenLogprobs:
        """The same entry with the texts and the bytes of its tokens. It is not one of the output."""
        spelled = [
            self._tokenizer.token_bytes(token) for token in (entry.token_id, *(token for token, _ in entry.top))
        ]
        texts = [one.decode(errors="replace") for one in spelled]
        return replace(entry, texts=texts, bytes=[list(one) for one in spelled])


@dataclass(slots=True)
class _Node:
    depth: int
    stop: str | None = None  # the longest stop string that ends here
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # the node of the longest proper suffix that is a prefix of a stop string


class StopAutomaton:
    """Compiled stop strings; immutable, shared by their matchers."""

    __slots__ = ("root",)

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = _Node(0)
        for k, stop in enumerate(stops):
            if not stop:
                raise InvalidRequest(f"stop[{k}]", "must not be empty", repr(stop))
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        node = self.root
        for letter in stop:
            node = node.next.setdefault(letter, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        """Set the fail links, breadth first, so that a node's fail node is linked before it."""
        queue = deque(self.root.next.values())
        for node in queue:
            node.fail = self.root
        while queue:
            node = queue.popleft()
            for letter, child in node.next.items():
                child.fail = self._step(node.fail, letter)
                child.stop = child.stop or child.fail.stop
                queue.append(child)

    def _step(self, node: _Node | None, letter: str) -> _Node:
        while node is not None:
            child = node.next.get(letter)
            if child is not None:
                return child
            node = node.fail
        return self.root


@lru_cache(maxsize=64)
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings. Requests of one application mostly have the same few."""
    return StopAutomaton(stops)


class StopMatcher:
    """Passes text through, up to the first stop string. With `include_stop`, the stop string is passed, too."""

    __slots__ = ("_automaton", "_held", "_include_stop", "_node", "stop")

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._node = automaton.root
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Append text. Returns text that cannot be part of a stop string. If `stop` is set, nothing follows.

        With `may_stop` false, a stop string that ends in this text does not count.
        """
        node, root = self._node, self._automaton.root
        for k, letter in enumerate(text):
            child = node.next.get(letter)
            if child is None and node is not root:
                child = self._automaton._step(node.fail, letter)
            node = child or root
            if node.stop is not None and may_stop:
                self.stop = node.stop
                whole = self._held + text[: k + 1]
                self._held, self._node = "", root
                return whole if self._include_stop else whole[: len(whole) - len(node.stop)]
        whole = self._held + text
        self._node = node
        sure = len(whole) - node.depth
        self._held = whole[sure:]
        return whole[:sure]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held
