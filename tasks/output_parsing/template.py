"""A template, checked and compiled: which marks end what, and how calls are written.

The form is that of `response_template` in transformers. A field without an opening mark has all text between the
other fields. Spaces around marks are left to the parser, so `\\s*` at the ends of a pattern is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any, Literal

from petiole.tasks.output_parsing.json_values import Dialect, is_bare_key
from petiole.tasks.output_parsing.marks import Mark, Marks
from petiole.tasks.output_parsing.patterns import (
    SPACES,
    Alternation,
    Concatenation,
    Group,
    Node,
    Repetition,
    groups,
    literal,
    matches,
    node_of,
    parsed,
    without_spaces_around,
)
from petiole.tasks.output_parsing.tagged_tool_calls import Tagged, TaggedMarks
from petiole.tasks.output_parsing.tool_calls import (
    Arguments,
    Body,
    Calls,
    JsonCalls,
    PythonCalls,
    is_name,
    meant,
)

Kind = Literal["content", "reasoning", "calls"]
Tools = Mapping[str, Mapping[str, str]]
"""By tool: the types of its parameters, as `types.types_of` has them."""

_KINDS: dict[str, Kind] = {
    "content": "content",
    "reasoning": "reasoning",
    "reasoning_content": "reasoning",
    "thinking": "reasoning",
    "tool_calls": "calls",
}
_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip
_TOP = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_NAME_KEYS, _ARGUMENT_KEYS = ("name",), ("arguments", "parameters")


@dataclass(frozen=True, eq=False)
class Field:
    """`open`, `close`: the trees of its marks. `strip`: spaces beside the marks do not count."""

    kind: Kind
    open: Node | None
    close: Node | None
    strip: bool
    reader: _CallReader | None = None

    @cached_property
    def closing(self) -> Marks | None:
        return None if self.close is None else Marks([self.close])

    @cached_property
    def ending(self) -> Marks:
        """What ends a call that is not valid: the closing mark; without one, the next opening mark (1)."""
        ends = self.close if self.close is not None else self.open
        assert ends is not None
        return Marks([ends])


class WatchedMarks:
    """The marks that may come outside all fields. `fields[n]`: the field that the mark n opens; None: it only
    ends content."""

    def __init__(self, opens: Sequence[Field], closes: Sequence[Node]) -> None:
        trees = [field.open for field in opens if field.open is not None]
        self.fields: list[Field | None] = [*opens, *(None for _ in closes)]
        self.marks = Marks([*trees, *closes])


class Template:
    """Immutable. `needs_tool`: calls have no mark of their own, so only a name of a tool begins one. `whole`: a
    whole message of JSON may be a call."""

    def __init__(self, given: Mapping[str, Any], *, needs_tool: bool = False, whole: bool = False) -> None:
        """Raises ValueError."""
        _check_keys("template", given, _TOP)
        if given.get("version", 1) != 1:
            raise ValueError(f"version: must be 1, got {given['version']!r}")
        fields = given.get("fields")
        if not isinstance(fields, Mapping) or not fields:
            raise ValueError("fields: must be an object with fields")
        self.needs_tool, self.whole = needs_tool, whole
        self.fields = [_field(name, each) for name, each in fields.items()]
        implicit = [field for field in self.fields if field.open is None]
        if len(implicit) > 1 or any(field.kind == "calls" for field in implicit):
            raise ValueError("fields: at most one may have no opening mark, and not tool_calls")
        self.implicit = implicit[0] if implicit else None
        anchor = _tree("start_anchor", given, "start_anchor", "start_anchor_pattern")
        self._anchor = None if anchor is None else Marks([anchor])

    @property
    def has_calls(self) -> bool:
        return any(field.kind == "calls" for field in self.fields)

    @property
    def has_reasoning(self) -> bool:
        return any(field.kind == "reasoning" for field in self.fields)

    @cached_property
    def with_calls(self) -> WatchedMarks:
        return self._watch([field for field in self.fields if field.open is not None])

    @cached_property
    def without_calls(self) -> WatchedMarks:
        return self._watch([field for field in self.fields if field.open is not None and field.kind != "calls"])

    @cached_property
    def _after(self) -> dict[int, WatchedMarks]:
        opens = [field for field in self.fields if field.open is not None]
        return {
            id(field): self._watch(opens, field.close)
            for field in opens
            if field.kind == "calls" and field.close is not None
        }

    def after(self, field: Field) -> WatchedMarks:
        """The marks that may come after a call, whose own end was not read yet."""
        return self._after.get(id(field), self.with_calls)

    def _watch(self, opens: Sequence[Field], more: Node | None = None) -> WatchedMarks:
        own = None if self.implicit is None else self.implicit.close
        return WatchedMarks(opens, [tree for tree in (own, more) if tree is not None])

    def carries_name(self, name: str) -> bool:
        """Whether a call of a tool with this name can be written and read."""
        return all(reader.carries_name(name) for reader in self._readers)

    def carries_key(self, key: str, *, inside: bool) -> bool:
        """The same for a parameter with this name. `inside`: for a key of an object within the arguments."""
        return all(reader.carries_key(key, inside=inside) for reader in self._readers)

    @property
    def _readers(self) -> list[_CallReader]:
        return [field.reader for field in self.fields if field.reader is not None]

    def behind_anchor(self, prompt_end: str) -> str:
        """What the prompt has written of the answer already."""
        at, anchor = 0, self._anchor
        if anchor is None:
            return ""
        begins = 0
        while isinstance(found := anchor.find(prompt_end, at, final=True), Mark):
            at = begins = found.end
        return prompt_end[begins:]


@lru_cache(maxsize=256)
def _compiled(text: str, needs_tool: bool, whole: bool) -> Template:
    return Template(json.loads(text), needs_tool=needs_tool, whole=whole)


def compiled(given: Mapping[str, Any], *, needs_tool: bool = False, whole: bool = False) -> Template:
    """The template, compiled once for the same contents. Raises ValueError."""
    try:
        text = json.dumps(given, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"template: must be JSON: {error}") from None
    return _compiled(text, needs_tool, whole)


# ---------------------------------------------------------------- fields


def _check_keys(what: str, given: object, known: Collection[str]) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(f"{what}: must be an object, got {type(given).__name__}")
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{what}: {', '.join(map(str, unknown))} are not among what is read here")


def _tree(what: str, given: Mapping[str, Any], text: str, pattern: str) -> Node | None:
    if text in given and pattern in given:
        raise ValueError(f"{what}: must have {text} or {pattern}, not both")
    if pattern in given:
        if not isinstance(given[pattern], str):
            raise ValueError(f"{what}.{pattern}: must be text")
        return without_spaces_around(parsed(given[pattern]))
    if text not in given:
        return None
    texts = [given[text]] if isinstance(given[text], str) else given[text]
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"{what}.{text}: must be text or a list of texts")
    return literal(texts[0]) if len(texts) == 1 else Alternation(tuple(map(literal, texts)))


def _field(name: str, given: object) -> Field:
    what = f"fields.{name}"
    _check_keys(what, given, _KEYS)
    assert isinstance(given, Mapping)
    if name not in _KINDS:
        raise ValueError(f"fields: {name} is not among what is read here")
    kind = _KINDS[name]
    open, close = (
        _tree(what, given, "open", "open_pattern"),
        _tree(what, given, "close", "close_pattern"),
    )
    content, arguments = given.get("content", "text"), given.get("content_args", {})
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{what}.content_args: must be an object")
    if kind != "calls":
        if content != "text" or given.get("transform") is not None:
            raise ValueError(f"{what}.content: must be text")
        return Field(kind, open, close, bool(arguments.get("strip", True)))
    reader = _CallReader(what, content, arguments, given.get("transform"), open, close)
    return Field(kind, open, close, True, reader)


class _CallReader:
    """How a field writes its calls. Groups of its opening mark: `name`, a tool's; `list`, the bracket that begins
    a list."""

    def __init__(
        self,
        what: str,
        content: object,
        arguments: Mapping[str, Any],
        transform: object,
        open: Node | None,
        close: Node | None,
    ) -> None:
        name, given = _shape(what, transform)
        captured = set(groups(open)) if open is not None else set()
        self.content, self.captured, self._opened = content, "name" in captured, "list" in captured
        self.dialect = _dialect(what, arguments)
        self.names, self.keys = (name,) if name else _NAME_KEYS, (given,) if given else _ARGUMENT_KEYS
        self._name = None if open is None else node_of(open, "name")
        self._key: Node | None = None
        if content == "xml-inline":
            if not self.captured or open is None or close is None:
                raise ValueError(f"{what}: xml-inline needs a group name in open_pattern, and a closing mark")
            self._tags, self._key = _tags(what, arguments, open, close)
        elif content not in ("json", "python-call-list"):
            raise ValueError(f"{what}.content: must be json, xml-inline or python-call-list, got {content!r}")

    def body(self, calls: Calls, captures: Mapping[str, str], tools: Tools, needs_tool: bool) -> Body:
        needs = tools.keys() if needs_tool else None
        if self.content == "python-call-list":
            return PythonCalls(calls, tools, needs, opened=self._opened)
        if self.captured:
            name = meant(captures.get("name", ""), tools)
            if name not in tools and re.search(r"\s", name):
                name = ""  # several words are a name only if a tool has it
            kinds = tools.get(name, {})
            if self.content == "json":
                return Arguments(calls, name, self.dialect, needs, kinds)
            return Tagged(calls, name, self._tags, kinds)
        return JsonCalls(calls, self.dialect, self.names, self.keys)

    def carries_name(self, name: str) -> bool:
        bare = self.content != "python-call-list" or _is_python(name)
        return is_name(name) and bare and (self._name is None or _is_plain(name, self._name))

    def carries_key(self, key: str, *, inside: bool) -> bool:
        if self.content == "python-call-list":
            return inside or (is_name(key) and _is_python(key))
        if self.dialect.bare_keys:  # a parameter is known to the reader, so it may have the mark that ends a key
            return is_name(key) and is_bare_key(key if inside else key.replace(":", "_"))
        return inside or self._key is None or (is_name(key) and _is_plain(key, self._key))


def _is_plain(name: str, node: Node) -> bool:
    return name == name.strip() and matches(node, name)


def _is_python(name: str) -> bool:
    return is_bare_key(name) and not {*"()="} & {*name}


def _shape(what: str, transform: object) -> tuple[str, str]:
    """The members of an object that are the name and the arguments; empty where they are the usual ones."""
    inner = transform.get("function", transform) if isinstance(transform, Mapping) else transform
    match inner:
        case None | "{content}" | {"name": "{name}", "arguments": "{content}" | "{arguments}"}:
            return "", ""
        case {"name": str(name), "arguments": str(given)}:
            found = [re.fullmatch(r"\{(?:content\.)?(\w+)\}", one) for one in (name, given)]
            if found[0] is not None and found[1] is not None:
                given = "" if found[1][1] == "content" else found[1][1]
                return found[0][1], given
    raise ValueError(f"{what}.transform: must say what is name and arguments of a call")


def _dialect(what: str, given: Mapping[str, Any]) -> Dialect:
    quotes = given.get("string_delims", [])
    pairs = [tuple(pair) for pair in quotes] if isinstance(quotes, list) else [()]
    if not all(len(pair) == 2 and all(isinstance(one, str) and one for one in pair) for pair in pairs):
        raise ValueError(f"{what}.content_args.string_delims: must be pairs of texts")
    return Dialect(bool(given.get("unquoted_keys", False)), tuple((pair[0], pair[1]) for pair in pairs))


def _tags(what: str, given: Mapping[str, Any], open: Node, close: Node) -> tuple[TaggedMarks, Node]:
    """The marks of arguments, and what the name of a parameter is."""
    pattern = given.get("tag_pattern")
    tree = parsed(pattern) if isinstance(pattern, str) else None
    if not isinstance(tree, Concatenation):
        raise ValueError(f"{what}.content_args.tag_pattern: must be a pattern")
    at = next((k for k, part in enumerate(tree.parts) if isinstance(part, Group) and part.name == "value"), -1)
    head, tail = Concatenation(tree.parts[: max(at, 0)]), Concatenation(tree.parts[at + 1 :])
    key = node_of(head, "key")
    if at < 0 or key is None or not tail.parts:
        raise ValueError(f"{what}.content_args.tag_pattern: must have a group key, a group value, and an end")
    begin = Concatenation(tuple(takewhile(lambda part: isinstance(part, Repetition), tail.parts)))

    def followed(*parts: Node) -> Concatenation:
        return Concatenation((*parts[:-1], SPACES, Group("next", parts[-1])))

    again = Concatenation((without_spaces_around(close), SPACES, open))
    values = given.get("value_parser") or {}
    return TaggedMarks(
        head=Marks([head]),
        close=Marks([close]),
        between=Marks([head, close]),
        tail=Marks(
            [
                followed(tail, Alternation((head, close))),
                Concatenation((begin, Group("next", head))),
                followed(begin, again),
            ]
        ),
        last=Marks([tail, Concatenation((begin, close))]),
        plain="any" if isinstance(values, Mapping) and values.get("name") == "json" else "string",
    ), key
