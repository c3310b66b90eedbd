"""From nodes to the rules of a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from petiole.gpu_worker.constraints.schema import numbers, object_keys, patterns
from petiole.gpu_worker.constraints.schema.intersection import Intersection, item_at
from petiole.gpu_worker.constraints.schema.nodes import (
    AllOf,
    AnyOf,
    Anything,
    Array,
    Boolean,
    KeyRules,
    Node,
    Null,
    Number,
    Object,
    Reference,
    String,
)
from petiole.gpu_worker.constraints.schema.rules import MAX_SYMBOLS, Raw, Repeated, Rule, Rules, Symbol, Terminal
from petiole.gpu_worker.exceptions import InvalidRequest

WHITESPACE = r"\n?[ ]{0,16}"
"""Whitespace between the parts of a JSON value: enough for compact and indented output, but limited, so that a
model cannot spend its token budget on blanks."""

MAX_UNIQUE = 64
"""`uniqueItems` is enforced for items of at most this many values: the grammar library counts them in 64 bits."""

HEAD = f'%llguidance {{"ignore_once": true}}\n%ignore /{WHITESPACE}/'
_PUNCTUATION = {text: Terminal(json.dumps(text)) for text in "{}[],:"}
_OPEN, _CLOSE, _BEGIN, _END, _COMMA, _COLON = _PUNCTUATION.values()


class Writer:
    """Writes the grammar of one schema. Equal nodes share a rule."""

    def __init__(self, field: str, resolve: Callable[[str], Node]) -> None:
        self._field = field
        self._resolve = resolve
        self._meeting = Intersection(field, resolve)
        self._rules = Rules()
        self._of: dict[Node, Rule] = {}

    def text(self, root: Node) -> str:
        text = self._rules.text(self._rule(root), HEAD)
        if text is None:
            raise InvalidRequest(self._field, "must allow a value", "a schema that allows none")
        return text

    def _rule(self, node: Node) -> Rule:
        if node not in self._of:
            rule = self._of[node] = self._rules.new()
            for symbols in self._alternatives(node):
                self._add(rule, *symbols)
        return self._of[node]

    def _add(self, rule: Rule, *symbols: Symbol) -> None:
        self._rules.add(rule, *symbols)
        if self._rules.n_symbols > MAX_SYMBOLS:
            raise InvalidRequest(self._field, f"must need at most {MAX_SYMBOLS} symbols in a grammar", "more")

    def _alternatives(self, node: Node) -> list[tuple[Symbol, ...]]:
        match node:
            case Anything():
                return [(_library({}),)]
            case Reference(pointer):
                return [(self._rule(self._resolve(pointer)),)]
            case AnyOf(options):
                self._meeting.check_exclusive(node)
                return self._any_of(options)
            case AllOf():
                return self._any_of(self._meeting.shapes(node))
        return self._any_of((node,))

    def _any_of(self, options: Sequence[Node]) -> list[tuple[Symbol, ...]]:
        """An alternative for each option; one terminal for all scalars."""
        scalars: list[str] = []
        alternatives: list[tuple[Symbol, ...]] = []
        for option in options:
            match option:
                case Null():
                    scalars.append('"null"')
                case Boolean(values):
                    scalars += [f'"{json.dumps(value)}"' for value in sorted(values)]
                case Number():
                    if (number := numbers.normal(option)) is not None:
                        if number.multiple:
                            for one in self._multiples(number):
                                if isinstance(one, str):
                                    scalars.append(one)
                                else:
                                    alternatives.append((_library(one),))
                        else:
                            scalars.append(numbers.terminal(number))
                case String(values=None):
                    alternatives += [(_library(one),) for one in self._strings(option)]
                case String():
                    scalars += [json.dumps(object_keys.quoted(value)) for value in self._values(option)]
                case Array():
                    alternatives += self._array(option)
                case Object():
                    alternatives += self._object(option)
                case _:
                    alternatives.append((self._rule(option),))
        return ([(Terminal(" | ".join(scalars)),)] if scalars else []) + alternatives

    # ------------------------------------------------------------ scalars

    def _multiples(self, number: Number) -> Iterator[dict[str, Any] | str]:
        limit = numbers.MAX_MULTIPLE_BOUND
        for bound in (number.low, number.high):
            if bound is not None and abs(bound) > limit:
                raise InvalidRequest(
                    self._field, f"must have bounds of at most {limit} beside multipleOf", int(bound)
                )
        return numbers.multiples(number)

    def _strings(self, string: String) -> list[dict[str, Any]]:
        """The schema for the grammar library, which escapes what JSON must escape; none if nothing matches."""
        schema: dict[str, Any] = {"type": "string"}
        if string.low:
            schema["minLength"] = string.low
        if string.high is not None:
            schema["maxLength"] = string.high
        if string.patterns:
            schema["allOf"] = [{"pattern": pattern} for pattern in string.patterns]
        if string.high is not None and string.low > string.high:
            return []
        fault = patterns.fault(*string.patterns, low=string.low, high=string.high) if string.patterns else ""
        if fault and not fault.startswith(patterns.UNSATISFIABLE):
            raise InvalidRequest(f"{self._field}.pattern", fault, " and ".join(string.patterns))
        return [] if fault else [schema]

    def _values(self, string: String) -> list[str]:
        """The allowed values of a string that has a list of them."""
        high = string.high
        return [
            value
            for value in string.values or ()
            if string.low <= len(value)
            and (high is None or len(value) <= high)
            and all(patterns.found(self._field, pattern, value) for pattern in string.patterns)
        ]

    # ------------------------------------------------------------ arrays

    def _array(self, array: Array) -> list[tuple[Symbol, ...]]:
        if array.unique and (values := self._unique_values(array)) is not None:
            return self._unique(array, values)
        n_listed = max((len(rules.prefix) for rules in array.rules), default=0)
        if max(n_listed - array.low, 1) * n_listed > MAX_SYMBOLS:
            limit = f"must have at most {MAX_SYMBOLS} prefixItems times those that may be missing"
            raise InvalidRequest(self._field, limit, f"{n_listed} times {n_listed - array.low}")
        alternatives: list[tuple[Symbol, ...]] = [(_BEGIN, _END)] if array.low == 0 else []
        listed: list[Symbol] = []
        for index in range(n_listed):
            listed += [_COMMA] * bool(listed) + [self._rule(item_at(array.rules, index))]
            if array.low <= index + 1 and (array.high is None or index + 1 <= array.high):
                alternatives.append((_BEGIN, *listed, _END))
        low, high = max(array.low - n_listed, 1), None if array.high is None else array.high - n_listed
        if high is None or high >= low:
            item = self._rule(item_at(array.rules, n_listed))
            more = (low - bool(not listed), None if high is None else high - bool(not listed))
            first = listed or [item]
            alternatives.append((_BEGIN, *first, Repeated((_COMMA, item), *more), _END))
        return alternatives

    def _unique_values(self, array: Array) -> list[Terminal] | None:
        """The values of the items of a list, if the list can be kept free of repetitions: scalars, few enough."""
        if any(rules.prefix for rules in array.rules):
            return None
        values: list[str] = []
        for shape in self._meeting.shapes(item_at(array.rules, 0)):
            match shape:
                case Null():
                    values.append('"null"')
                case Boolean(truths):
                    values += [f'"{json.dumps(value)}"' for value in sorted(truths)]
                case String(values=tuple()):
                    values += [json.dumps(object_keys.quoted(value)) for value in self._values(shape)]
                case Number() if (
                    (number := numbers.normal(shape)) and number.low is not None and number.low == number.high
                ):
                    values.append(numbers.terminal(number))
                case _:
                    return None
        values = list(dict.fromkeys(values))
        return [Terminal(value) for value in values] if len(values) <= MAX_UNIQUE else None

    def _unique(self, array: Array, values: Sequence[Terminal]) -> list[tuple[Symbol, ...]]:
        """A rule whose parameter has a bit for each value that the list has already."""
        most = len(values) if array.high is None else min(array.high, len(values))
        alternatives: list[tuple[Symbol, ...]] = [(_BEGIN, _END)] if array.low == 0 else []
        if most and array.low <= most:
            rest = self._rules.new()
            for k, value in enumerate(values):
                last = Raw(f"%if and(bit_clear({k}), bit_count_ge(_, {max(array.low - 1, 0)}))")
                self._add(rest, value, last)
                more = Raw(f"{rest.name}::set_bit({k}) %if and(bit_clear({k}), bit_count_lt(_, {most - 1}))")
                self._add(rest, value, _COMMA, more)
            self._rules.parametric.add(rest.name)
            alternatives.append((_BEGIN, Rule(f"{rest.name}"), _END))
        return alternatives

    # ------------------------------------------------------------ objects

    def _object(self, shape: Object) -> list[tuple[Symbol, ...]]:
        """The entries in the order of the schema, then those that it does not name.

        `counted[n]` derives the lists of n entries so far, or of at least `most` for n = most if there is no
        limit; `counted[0]` is whether none is possible.
        """
        names = [shape_of for node in shape.names for shape_of in [self._names(node)]]
        listed = dict.fromkeys(name for rules in shape.rules for name, _ in rules.named)
        values = [name for rule in names for name in rule.values or ()]
        order = [*dict.fromkeys([*listed, *shape.required, *values])]
        allowed = [name for name in order if all(self._is_name(rule, name) for rule in names)]
        if any(name not in allowed for name in shape.required):
            return []
        required = frozenset(shape.required)
        entries: list[tuple[tuple[Symbol, ...], bool]] = []
        for name, node in zip(allowed, self._meeting.values_of(shape.rules, allowed), strict=True):
            value = self._rule(node)
            key = Terminal(json.dumps(object_keys.quoted(name)))
            entries.append(((key, _COLON, value), name in required))
        free = None
        if not any(rule.values is not None for rule in names):
            free = self._free(shape.rules, names, order)
        return self._entries(entries, free, shape.low, shape.high)

    def _names(self, node: Node) -> String:
        strings = [shape for shape in self._meeting.shapes(node) if isinstance(shape, String)]
        if len(strings) > 1:
            kinds = f"{len(strings)} kinds"
            raise InvalidRequest(f"{self._field}.propertyNames", "must be one kind of text", kinds)
        return strings[0] if strings else String(values=())

    def _is_name(self, rule: String, name: str) -> bool:
        return (
            rule.low <= len(name)
            and (rule.high is None or len(name) <= rule.high)
            and (rule.values is None or name in rule.values)
            and all(patterns.found(self._field, pattern, name) for pattern in rule.patterns)
        )

    def _free(self, rules: Sequence[KeyRules], names: Sequence[String], taken: Sequence[str]) -> Rule:
        rule = self._rules.new()
        for key, value in object_keys.free_keys(self._field, rules or (KeyRules(),), names, taken):
            self._add(rule, key, _COLON, self._rule(value))
        return rule

    def _entries(
        self, entries: Sequence[tuple[tuple[Symbol, ...], bool]], free: Rule | None, low: int, high: int | None
    ) -> list[tuple[Symbol, ...]]:
        if high is not None and free is None and high >= len(entries):
            high = None
        cap = max(low, 1) if high is None else high
        if max(len(entries), 1) * cap > MAX_COUNTED:
            limit = f"must have at most {MAX_COUNTED} properties times minProperties or maxProperties"
            raise InvalidRequest(self._field, limit, f"{len(entries)} times {cap}")
        none, counted = True, dict[int, Rule]()
        for symbols, is_required in entries:
            none, counted = self._appended(none, counted, symbols, is_required, cap, high is None)
        if free is not None:
            none, counted = self._repeated(none, counted, free, cap, high is None)
        alternatives: list[tuple[Symbol, ...]] = [(_OPEN, _CLOSE)] if none and low == 0 else []
        return alternatives + [(_OPEN, rule, _CLOSE) for n, rule in counted.items() if n >= low]

    def _appended(
        self,
        none: bool,
        counted: dict[int, Rule],
        entry: tuple[Symbol, ...],
        is_required: bool,
        cap: int,
        unlimited: bool,
    ) -> tuple[bool, dict[int, Rule]]:
        """`counted` after one more entry, which may be left out unless it is required."""
        after: dict[int, Rule] = {}
        for n in range(1, min(cap, max(counted, default=0) + 1) + 1):
            rule = after[n] = self._rules.new()
            if not is_required and n in counted:
                self._add(rule, counted[n])
            if n == 1 and none:
                self._add(rule, *entry)
            if n - 1 in counted:
                self._add(rule, counted[n - 1], _COMMA, *entry)
            if unlimited and n == cap and n in counted:
                self._add(rule, counted[n], _COMMA, *entry)
        return none and not is_required, after

    def _repeated(
        self, none: bool, counted: dict[int, Rule], entry: Rule, cap: int, unlimited: bool
    ) -> tuple[bool, dict[int, Rule]]:
        """`counted` after any number of entries."""
        after = {n: self._rules.new() for n in range(1, cap + 1)}
        for n, rule in after.items():
            if n in counted:
                self._add(rule, counted[n])
            if n == 1 and none:
                self._add(rule, entry)
            if n > 1:
                self._add(rule, after[n - 1], _COMMA, entry)
            if unlimited and n == cap:
                self._add(rule, rule, _COMMA, entry)
        return none, after


MAX_COUNTED = 20_000
"""Maximum number of properties, times the number of entries that `minProperties` or `maxProperties` counts to."""


def _library(schema: dict[str, Any]) -> Raw:
    """A schema that the grammar library compiles; its whitespace must be ours, so that the two become one."""
    return Raw("%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}))
