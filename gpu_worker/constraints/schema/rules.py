"""A grammar as rules, and its text in Lark's notation.

Rules that lead nowhere are left out: a rule may need itself to end, or a value that nothing matches. So an output
that keeps to the grammar can always be completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_SYMBOLS = 400_000
"""Maximum number of symbols in all rules, below the grammar library's limit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The name of a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal, by its expression in Lark's notation."""

    text: str


@dataclass(frozen=True, slots=True)
class Raw:
    """A symbol that is copied as it is, such as `%json {...}`."""

    text: str


@dataclass(frozen=True, slots=True)
class Repeated:
    """`symbols`, repeated `low` to `high` times."""

    symbols: tuple[Symbol, ...]
    low: int
    high: int | None


Symbol = Rule | Terminal | Raw | Repeated
Alternative = tuple[Symbol, ...]


@dataclass(slots=True)
class Rules:
    """The rules of a grammar, and the alternatives of each."""

    alternatives: dict[str, list[Alternative]] = field(default_factory=dict)
    parametric: set[str] = field(default_factory=set)
    """Rules with a parameter of 64 bits, which is 0 where others use them."""
    n_symbols: int = 0

    def new(self) -> Rule:
        name = f"r{len(self.alternatives)}"
        self.alternatives[name] = []
        return Rule(name)

    def add(self, rule: Rule, *symbols: Symbol) -> None:
        self.alternatives[rule.name].append(symbols)
        self.n_symbols += len(symbols)

    def text(self, start: Rule, head: str) -> str | None:
        """The grammar; None if it derives no output."""
        alive = self._productive()
        if start.name not in alive:
            return None
        terminals: dict[str, str] = {}
        lines = [head, f"start: {self._written([start], terminals)}"]
        for name in self._reachable(start, alive):
            kept = [_kept(symbols, alive) for symbols in self.alternatives[name]]
            written = [self._written(symbols, terminals) or '""' for symbols in kept if symbols is not None]
            head = f"{name}::_" if name in self.parametric else name
            lines.append(f"{head}: " + "\n | ".join(dict.fromkeys(written)))
        lines += [f"{name}: {text}" for text, name in terminals.items()]
        return "\n".join(lines) + "\n"

    def _written(self, symbols: Sequence[Symbol], terminals: dict[str, str]) -> str:
        written = []
        for symbol in symbols:
            match symbol:
                case Rule(name):
                    written.append(f"{name}::0" if name in self.parametric else name)
                case Raw(text):
                    written.append(text)
                case Repeated(inner, low, high):
                    counts = "*" if (low, high) == (0, None) else f"{{{low},{'' if high is None else high}}}"
                    written.append(f"({self._written(inner, terminals)}){counts}")
                case Terminal(text):
                    written.append(terminals.setdefault(text, f"T{len(terminals)}"))
        return " ".join(written)

    def _productive(self) -> frozenset[str]:
        """The rules that derive something."""
        users: dict[str, list[str]] = {}
        for name, alternatives in self.alternatives.items():
            for symbols in alternatives:
                for used in _rules_in(symbols):
                    users.setdefault(used, []).append(name)
        alive: set[str] = set()
        waiting = list(self.alternatives)
        while waiting:
            name = waiting.pop()
            if name not in alive and any(_kept(s, alive) is not None for s in self.alternatives[name]):
                alive.add(name)
                waiting += users.get(name, [])
        return frozenset(alive)

    def _reachable(self, start: Rule, alive: frozenset[str]) -> list[str]:
        seen, waiting = {start.name: None}, [start.name]
        while waiting:
            for symbols in self.alternatives[waiting.pop()]:
                kept = _kept(symbols, alive)
                for used in _rules_in(kept or ()):
                    if used not in seen:
                        seen[used] = None
                        waiting.append(used)
        return list(seen)


def _rules_in(symbols: Sequence[Symbol]) -> list[str]:
    found = []
    for symbol in symbols:
        if isinstance(symbol, Rule):
            found.append(symbol.name)
        elif isinstance(symbol, Repeated):
            found += _rules_in(symbol.symbols)
    return found


def _kept(symbols: Sequence[Symbol], alive: frozenset[str] | set[str]) -> Alternative | None:
    """An alternative without repetitions that need not occur and cannot; None if it derives nothing."""
    kept: list[Symbol] = []
    for symbol in symbols:
        if isinstance(symbol, Repeated):
            possible = all(name in alive for name in _rules_in(symbol.symbols))
            if symbol.low and not possible:
                return None
            if symbol.high != 0 and possible:
                kept.append(symbol)
        elif isinstance(symbol, Rule) and symbol.name not in alive:
            return None
        else:
            kept.append(symbol)
    return tuple(kept)
