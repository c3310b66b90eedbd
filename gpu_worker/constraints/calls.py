"""Calls of tools as a grammar: what a family writes around a call, the schema of each tool, and what may be said
instead, composed to one grammar.

    [thought] calls                       where a call must come
    [thought] (text [calls] | answer)     where one may come

Whoever asks says how calls are written, as data. A mark may be a special token or plain text. Text is read up to
the next mark, so a mark that is plain text cannot be said without what belongs after it. Where the prompt has
begun the thought, it must end before anything else comes.

    {"thought": {"open", "close", "after"} or null, "thinks": "open", "closed" or "free",
     "first", "between", "last", "trigger": texts around calls; the first thing that a call writes,
     "begins": {"before", "after", "next": patterns, "then": text} or null: see `_unmarked`,
     "calls": [{"name", "strict", "begin", "end", and "schema", or
                "tags": {"begin", "after", "end", "between", "quotes"}: around a key and its value,
                "arguments": [{"key", "needed", and "schema", "choice" or "text"}]}],
     "least", "most": how many calls,
     "answer": {"kind", "value"} or null, "answer_begin": what must, or may, be said instead,
     "whole": a pattern of texts that may not be said instead, because they are read as calls,
     "budget": how many tokens the thought may have, "free": whether nothing but the budget counts}

A budget is no part of the grammar: see `budget`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import ConstraintKind

Sources = Mapping[ConstraintKind, Callable[[str, Any], str]]
"""By the kind of another constraint: what makes its grammar, in Lark's notation or as the library's JSON."""

_ANYTHING = "/(.|\\n)*/"
_NOTHING = '""'
_SPACES = "/[ \\t\\r\\n]{1,4}/"
_GAP = r"[\s\x1c-\x1f]*"


def source_of(asked: Mapping[str, Any], special: Mapping[str, int], sources: Sources) -> str:
    """The grammar as JSON. `special`: the ids of special tokens, by their texts. Raises InvalidRequest."""
    return _Composer(special, sources).source(asked)


def shortest(asked: Mapping[str, Any]) -> str:
    """The text of the shortest call that must come, as far as its schema tells: no length or pattern counts."""
    texts = []
    for call in asked["calls"]:
        if "arguments" in call:
            tags = call["tags"]
            needed = [
                f"{tags['begin']}{one['key']}{tags['after']}{_least(one)}{tags['end']}"
                for one in call["arguments"]
                if one["needed"]
            ]
            texts.append(f"{call['begin']}{tags['between'].join(needed)}{call.get('end', '')}")
        else:
            texts.append(f"{call['begin']}{_value(call.get('schema'))}{call.get('end', '')}")
    return f"{asked.get('first', '')}{min(texts, key=len)}{asked.get('last', '')}"


def _least(argument: Mapping[str, Any]) -> str:
    if "choice" in argument:
        return min(map(str, argument["choice"]), key=len, default="")
    return "" if argument.get("text") else _value(argument.get("schema"))


def _value(schema: Any, depth: int = 0) -> str:
    """A short value of a schema, as JSON."""
    if not isinstance(schema, Mapping) or depth > 16:
        return "0"
    if "const" in schema:
        return json.dumps(schema["const"])
    for key in ("enum", "anyOf", "oneOf"):
        if isinstance(listed := schema.get(key), Sequence) and listed:
            values = map(json.dumps, listed) if key == "enum" else (_value(one, depth + 1) for one in listed)
            return min(values, key=len)
    named = schema.get("type")
    kind = named[0] if isinstance(named, Sequence) and not isinstance(named, str) and named else named
    if kind == "object" or "properties" in schema:
        own = schema.get("properties")
        own, needed = own if isinstance(own, Mapping) else {}, schema.get("required")
        members = needed if isinstance(needed, Sequence) else ()
        written = ", ".join(f"{json.dumps(key)}: {_value(own.get(key), depth + 1)}" for key in members)
        return f"{{{written}}}"
    return {"string": '""', "array": "[]", "boolean": "true", "null": "null"}.get(str(kind), "0")


class _Composer:
    def __init__(self, special: Mapping[str, int], sources: Sources) -> None:
        self._special, self._sources = special, sources
        longest = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._names: dict[str, str] = {}  # of rules, terminals and inner grammars, by what they are
        self._lines: list[str] = []
        self._inner: list[dict[str, Any]] = []
        self._trigger = ""

    def source(self, asked: Mapping[str, Any]) -> str:
        self._trigger = asked.get("trigger", "")
        thought, body = self._thought(asked), self._body(asked)
        lines = [f"start: {thought} body".replace("  ", " "), f"body: {body}", *self._lines]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._inner]})

    # ------------------------------------------------------------ parts

    def _thought(self, asked: Mapping[str, Any]) -> str:
        thought, thinks = asked.get("thought"), asked.get("thinks", "free")
        if thought is None or thinks == "closed":
            return ""
        rest = f"{self._up_to(thought['close'])} {self._literal(thought.get('after', ''))}".strip()
        rest += f" ({self._terminal(_SPACES)})?"
        return rest if thinks == "open" else f"({self._literal(thought['open'])} {rest})?"

    def _body(self, asked: Mapping[str, Any]) -> str:
        answer = self._answer(asked)
        if not asked.get("calls"):
            return answer
        trigger, first = asked["trigger"], asked.get("first", "")
        calls = [self._call(call) for call in asked["calls"]]
        heads = [begin for begin, _ in calls]
        one = self._rule(" | ".join(f"{self._literal(begin)} {rest}" for begin, rest in calls))
        most = asked.get("most")
        count = "*" if most is None else f"{{0,{most - 1}}}"
        more = f"({self._literal(asked.get('between', ''))} {one}){count}" if most != 1 else ""
        last = self._literal(asked.get("last", ""))
        if asked["least"]:
            return f"{self._literal(first)} {one} {more} {last}"
        if asked.get("begins"):
            return f"{answer} | {self._unmarked(asked, calls)} {more} {last}"
        if not trigger or not all((first or head).startswith(trigger) for head in heads):
            limit = "must be required, or name a function: calls have no mark in this model's format"
            raise InvalidRequest("tool_choice", limit, "auto")
        behind = [f"{self._literal(begin.removeprefix(trigger))} {rest}" for begin, rest in calls]
        begun = f"{self._literal(first.removeprefix(trigger))} {one}" if first else self._rule(" | ".join(behind))
        lead = self._literal(trigger) if asked.get("answer_begin") else self._up_to(trigger)
        return f"{answer} | {lead} {begun} {more} {last}"

    def _unmarked(self, asked: Mapping[str, Any], calls: Sequence[tuple[str, str]]) -> str:
        """The first call, where no mark begins it, with the text before it. It has begun with the character `next`
        after a tool's name. Text up to a name may go on as text, so the lexer decides at that character."""
        begins = asked["begins"]
        alternatives = []
        for call, (_, rest) in zip(asked["calls"], calls, strict=True):
            up_to = f"/{begins['before']}{_escaped(call['name'])}{begins['after']}/"
            text = self._terminal(f"{up_to} & ~{_begun(asked)}")
            alternatives.append(f"{text} {self._literal(begins['then'])} {rest}")
        return self._rule(" | ".join(alternatives))

    def _call(self, call: Mapping[str, Any]) -> tuple[str, str]:
        """What a call begins with, and the rest of it."""
        if "arguments" in call:
            return call["begin"], self._arguments(call)
        end = self._literal(call.get("end", ""))
        return call["begin"], f"{self._schema(call, call.get('schema'), 'parameters')} {end}"

    def _arguments(self, call: Mapping[str, Any]) -> str:
        """In their order, with `between` between two, up to the end of the call. The end of a value and what
        follows it are one mark here, as for the reader of calls: the end alone may be a part of a text."""
        tags, end = call["tags"], call.get("end", "")
        begin, free = tags["between"] + tags["begin"], self._text_of(call)
        rest, last = "", True  # what may come after `begin`; whether the call may end there instead
        for one in reversed(call["arguments"]):
            follows = [(tags["end"] + begin, rest)] if rest else []
            follows += [(tags["end"] + end, "")] if last else []
            own = f"{self._literal(one['key'] + tags['after'])} {self._value(call, one, follows, free)}"
            rest = self._rule(own if one["needed"] or not rest else f"{own} | {rest}")
            last = last and not one["needed"]
        some = [f"{self._literal(tags['begin'])} {rest}"] if rest else []
        return self._rule(" | ".join([*some, *([self._literal(end) or _NOTHING] if last else [])]))

    def _value(
        self, call: Mapping[str, Any], one: Mapping[str, Any], follows: Sequence[tuple[str, str]], free: str
    ) -> str:
        """`follows`: the marks that may end the value, and what comes after each. `free`: what a text may be."""
        quotes, found = self._literal(call["tags"]["quotes"]), list[str]()
        behind = self._rule(" | ".join(f"{self._literal(mark)} {then}" for mark, then in follows))
        if one.get("text") and quotes:
            found.append(f"{quotes} {self._up_to(call['tags']['quotes'])} {behind}")
        elif one.get("text"):
            found += [f"{self._up_to(mark, free)} {then}" for mark, then in follows]
        if "choice" in one:
            texts = self._rule(" | ".join(self._literal(text) or _NOTHING for text in one["choice"]))
            found.append(f"{texts} {behind}")
        if "schema" in one:
            found.append(f"{self._schema(call, one['schema'], 'parameters')} {behind}")
        return self._rule(" | ".join(found))

    def _text_of(self, call: Mapping[str, Any]) -> str:
        """What a text without quotes may be: nothing in which its reader finds the end of a value."""
        tags, end = call["tags"], call.get("end", "")
        if not tags["end"] or not any(one.get("text") for one in call["arguments"]):
            return _ANYTHING
        begin, keys = _escaped(tags["begin"]), "|".join(_escaped(one["key"]) for one in call["arguments"])
        ended = f"{_loose(tags['end'])}{_GAP}({begin}|{_loose(end)})"
        next_argument = f"{begin}{_GAP}[\"']?({keys})[\"']?{_GAP}{_loose(tags['after'])}"
        next_call = f"{_loose(end)}{_GAP}{_escaped(self._trigger)}"
        within = self._terminal(f"/(.|\\n)*({ended}|{next_argument}|{next_call})(.|\\n)*/")
        return self._terminal(f"{_ANYTHING} & ~{within}")

    def _schema(self, call: Mapping[str, Any], schema: Any, what: str) -> str:
        """The arguments. A schema that cannot be compiled is an error only where the tool is strict."""
        field, given = f"tools.{call['name']}.{what}", {"type": "object"} if schema is None else schema
        try:
            return self._nested("json_schema", field, given)
        except InvalidRequest:
            if call.get("strict"):
                raise
            return self._nested("json_schema", field, {"type": "object"} if "arguments" not in call else {})

    def _answer(self, asked: Mapping[str, Any]) -> str:
        answer, begin = asked.get("answer"), self._literal(asked.get("answer_begin", ""))
        if answer is not None:
            inner = self._nested(answer["kind"], f"constraint.{answer['kind']}", answer["value"])
            return f"{begin} {inner}"
        trigger = asked.get("trigger", "")
        if asked.get("calls") and asked.get("begins"):
            return self._rule(self._terminal(f"{_ANYTHING} & ~{_begun(asked)}"))
        text = _ANYTHING
        if whole := asked.get("whole"):
            text += f" & ~/{whole}/"
        if asked.get("calls") and trigger and not self._marks.match(trigger):
            text += f" & ~/(.|\\n)*{_escaped(trigger)}(.|\\n)*/"
        return f"{begin} {self._rule(self._terminal(text))}"

    # ------------------------------------------------------------ notation

    def _rule(self, alternatives: str, attributes: str = "") -> str:
        return self._line("r", attributes, alternatives)

    def _terminal(self, expression: str) -> str:
        return self._line("T", "", expression)

    def _line(self, letter: str, attributes: str, text: str) -> str:
        key = f"{letter}{attributes}: {text}"
        if key not in self._names:
            self._names[key] = f"{letter}{len(self._lines)}"
            self._lines.append(f"{self._names[key]}{attributes}: {text}")
        return self._names[key]

    def _nested(self, kind: ConstraintKind, field: str, value: Any) -> str:
        key = f"{kind} {json.dumps(value)}"
        if key not in self._names:
            source, name = self._sources[kind](field, value), f"g{len(self._inner)}"
            inner = json.loads(source)["grammars"][0] if source.startswith("{") else {"lark_grammar": source}
            self._inner.append({**inner, "name": name})
            self._names[key] = f"@{name}"
        return self._names[key]

    def _literal(self, text: str) -> str:
        """A text in which special tokens are tokens."""
        parts, at = [], 0
        for found in self._marks.finditer(text):
            parts += [json.dumps(text[at : found.start()])] if found.start() > at else []
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        return " ".join([*parts, *([json.dumps(text[at:])] if text[at:] else [])])

    def _up_to(self, mark: str, text: str = _ANYTHING) -> str:
        """A text up to a mark, and the mark."""
        found = self._marks.search(mark)
        if found is not None and not mark[: found.start()].strip():  # spaces before it are a part of the text
            ended = mark[found.start() :]
            return f"{self._rule(self._terminal(text))} {self._literal(ended)}"
        plain, rest = (mark, "") if found is None else (mark[: found.start()], mark[found.start() :])
        return f"{self._rule(text, f'[suffix={json.dumps(plain)}]')} {self._literal(rest)}".strip()


def _loose(text: str) -> str:
    """A text in a pattern, with any spaces where it has some."""
    return _GAP.join(map(_escaped, text.split()))


def _escaped(text: str) -> str:
    """In a pattern."""
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)


def _begun(asked: Mapping[str, Any]) -> str:
    """All texts in which a call without a mark has begun."""
    begins, names = asked["begins"], "|".join(_escaped(call["name"]) for call in asked["calls"])
    return f"/{begins['before']}({names}){begins['after']}{begins['next']}(.|\\n)*/"
