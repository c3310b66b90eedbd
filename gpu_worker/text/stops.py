"""Stop strings, matched letter by letter on the text as it is made.

The match that is *complete* first wins; of several that end at the same letter, the longest. So the decision
depends on the text alone, not on how it was cut into deltas, and no text waits for a stop string that may still
come to win. What must be held back is exactly the longest end of the text that begins a stop string. Both facts
are read off an Aho-Corasick automaton: the depth of its state is the hold-back, its output the match.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_worker.errors import InvalidRequest


@dataclass(slots=True)
class _Node:
    depth: int
    stop: str | None = None  # the longest stop string that ends here
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None  # the longest proper suffix of this that begins a stop string


class StopAutomaton:
    """The compiled stop strings of a request; immutable, shared by its matchers."""

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
        """Breadth first, so that a node's fail is linked before it."""
        waiting = deque(self.root.next.values())
        for node in waiting:
            node.fail = self.root
        while waiting:
            node = waiting.popleft()
            for letter, child in node.next.items():
                child.fail = self._step(node.fail, letter)
                child.stop = child.stop or child.fail.stop
                waiting.append(child)

    def _step(self, node: _Node | None, letter: str) -> _Node:
        while node is not None:
            found = node.next.get(letter)
            if found is not None:
                return found
            node = node.fail
        return self.root


class StopMatcher:
    """Passes text on, up to the first stop string."""

    __slots__ = ("_automaton", "_held", "_node", "stop")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = automaton.root
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain not to be part of a stop string. When `stop` is set, it was the last."""
        node, root = self._node, self._automaton.root
        for k, letter in enumerate(text):
            found = node.next.get(letter)
            if found is None and node is not root:
                found = self._automaton._step(node.fail, letter)
            node = found or root
            if node.stop is not None:
                self.stop = node.stop
                whole = self._held + text[: k + 1]
                self._held, self._node = "", root
                return whole[: len(whole) - len(node.stop)]
        whole = self._held + text
        self._node = node
        sure = len(whole) - node.depth
        self._held = whole[sure:]
        return whole[:sure]

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held
