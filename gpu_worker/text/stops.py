"""Stop strings, matched incrementally on the generated text.

The match that *ends* first wins. Of several matches that end at the same character, the longest wins. So the
result depends only on the text, not on its division into deltas, and never on text that follows the match. The
longest suffix that is a prefix of a stop string is held back. An Aho-Corasick automaton gives both: the depth of
its state is the length of the text held back, and its output is the match."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from petiole.gpu_worker.exceptions import InvalidRequest


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
