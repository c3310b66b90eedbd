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
     "calls": [{"name", "strict", "begin", "end", and "schema" or
                "arguments": [{"begin", "end", "needed", and "schema", "choice" or "text"}], "between"}],
     "least", "most": how many calls,
     "answer": {"kind", "value"} or null, "answer_begin": what must, or may, be said instead,
     "budget": how many tokens the thought may have, "free": whether nothing but the budget counts}

A budget is no part of the grammar: see `budget`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from petiole.gpu_worker.errors import InvalidRequest
from petiole.gpu_worker.request import ConstraintKind

Sources = Mapping[ConstraintKind, Callable[[str, Any], str]]
"""By the kind of another constraint: what makes its grammar, in Lark's notation or as the library's JSON."""

_ANYTHING = "/(.|\\n)*/"
_NOTHING = '""'
_SPACES = "/[ \\t\\r\\n]{1,4}/"


def source_of(asked: Mapping[str, Any], special: Mapping[str, int], sources: Sources) -> str:
    """The grammar as JSON. `special`: the ids of special tokens, by their texts. Raises InvalidRequest."""
    return _Composer(special, sources).source(asked)


class _Composer:
    def __init__(self, special: Mapping[str, int], sources: Sources) -> None:
        self._special, self._sources = special, sources
        longest = sorted(special, key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        self._names: dict[str, str] = {}  # of rules, terminals and inner grammars, by what they are
        self._lines: list[str] = []
        self._inner: list[dict[str, Any]] = []

    def source(self, asked: Mapping[str, Any]) -> str:
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
        end = self._literal(call.get("end", ""))
        if "arguments" not in call:
            return call["begin"], f"{self._schema(call, call.get('schema'), 'parameters')} {end}"
        return call["begin"], f"{self._arguments(call)} {end}"

    def _arguments(self, call: Mapping[str, Any]) -> str:
        """In their order, with `between` between two: what may come depends on whether any came before."""
        between = self._literal(call.get("between", ""))
        first = later = ""
        for one in reversed(call["arguments"]):
            argument, needed = self._rule(self._argument(call, one)), one.get("needed")
            chosen = f"{argument} {later}"
            first = chosen if needed else self._rule(f"{chosen} | {first or self._rule(_NOTHING)}")
            more = f"{between} {argument}".strip()
            later = self._rule(f"{more} {later}" if needed else f"({more})? {later}")
        return first

    def _argument(self, call: Mapping[str, Any], one: Mapping[str, Any]) -> str:
        begin, end = self._literal(one["begin"]), one["end"]
        if one.get("text"):
            return f"{begin} {self._up_to(end)}"
        if "choice" in one:
            texts = self._rule(" | ".join(self._literal(text) or '""' for text in one["choice"]))
            return f"{begin} {texts} {self._literal(end)}"
        return f"{begin} {self._schema(call, one['schema'], 'parameters')} {self._literal(end)}"

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
        if not asked.get("calls") or not trigger or self._marks.match(trigger):
            return f"{begin} {self._rule(self._terminal(_ANYTHING))}"
        other = self._terminal(f"{_ANYTHING} & ~/(.|\\n)*{_escaped(trigger)}(.|\\n)*/")
        return f"{begin} {self._rule(other)}"

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

    def _up_to(self, mark: str) -> str:
        """Any text up to a mark, and the mark."""
        found = self._marks.search(mark)
        if found is not None and found.start() == 0:
            return f"{self._rule(self._terminal(_ANYTHING))} {self._literal(mark)}"
        plain, rest = (mark, "") if found is None else (mark[: found.start()], mark[found.start() :])
        return f"{self._rule(_ANYTHING, f'[suffix={json.dumps(plain)}]')} {self._literal(rest)}".strip()


def _escaped(text: str) -> str:
    """In a pattern."""
    return re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", text)


def _begun(asked: Mapping[str, Any]) -> str:
    """All texts in which a call without a mark has begun."""
    begins, names = asked["begins"], "|".join(_escaped(call["name"]) for call in asked["calls"])
    return f"/{begins['before']}({names}){begins['after']}{begins['next']}(.|\\n)*/"
