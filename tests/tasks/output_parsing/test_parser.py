"""Streamed, unstreamed and replayed are the same, for every text and every split; and what is read is what was
written."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.output_parsing.parser import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
    joined,
)
from petiole.tasks.output_parsing.template import Template
from tests.support.written import WITHOUT_CALLS, WITHOUT_REASONING, WRITERS, Said, deepseek_31, hermes, qwen_xml

TOOLS = {
    "get_weather": {"city": "string", "days": "integer", "exact": "boolean", "near": "object"},
    "now": {},
    "réveil": {"à": "string|null"},
}
FORMATS = sorted(FAMILIES)


def read(template: Template, pieces: Sequence[str], prompt_end: str = "") -> list[Event]:
    parser, whole, told = Parser(template, prompt_end=prompt_end, tools=TOOLS), "".join(pieces), 0
    events = [event for text in pieces for event in parser.push(text)] + parser.finish()
    for event in events:
        if isinstance(event, ContentDelta | ReasoningDelta):
            assert whole.startswith(event.text, event.at), "a text is where it is said to be"
            assert event.at >= told, "texts are told in their order"
            told = event.at + len(event.text)
    return joined(events)


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def said(events: Sequence[Event]) -> Said:
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    names = [event.name for event in events if isinstance(event, CallStarted)]
    given = [""] * len(names)
    for event in events:
        if isinstance(event, ArgumentsDelta):
            given[event.call] += event.text
    return Said(content, reasoning, [(name, json.loads(text)) for name, text in zip(names, given, strict=True)])


def check(events: Sequence[Event]) -> None:
    """What holds for the events of any text."""
    begun: dict[int, str] = {}
    open_call = None
    for event in events:
        match event:
            case CallStarted(index, name):
                assert open_call is None
                assert index == len(begun)
                assert name
                open_call, begun[index] = index, ""
            case ArgumentsDelta(index, text):
                assert index == open_call
                assert text
                begun[index] += text
            case CallEnded(index, complete):
                assert index == open_call
                open_call = None
                if complete:
                    assert isinstance(json.loads(begun[index]), dict), begun[index]
            case _:
                assert event.text
                assert open_call is None
    assert open_call is None


LETTERS = st.text(alphabet="ab<>/|[]{}\"'`=: \n\\é😀\t", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b_c"]), inner, max_size=2),
    max_leaves=5,
)
DEEP = st.dictionaries(
    st.sampled_from(["a", "b_c"]), VALUES | st.sampled_from(["x", "tr</tool_call>ue"]), max_size=3
)
STRINGS = st.sampled_from(
    [
        "Paris",
        "",
        "</tool_call>",
        "a\nb",
        '"',
        "\\",
        "é😀",
        "]}",
        "<think>",
        "null",
        "[1]",
        "it's",
        " a ",
        "\u2028",
    ]
)
CALLS = st.one_of(
    st.tuples(
        st.just("get_weather"),
        st.fixed_dictionaries(
            {}, optional={"city": STRINGS, "days": st.integers(), "exact": st.booleans(), "near": DEEP}
        ),
    ),
    st.tuples(st.just("now"), st.just({})),
)
PLAIN = st.sampled_from(["", "Hello.", "a < b", "I look.\nNow", "é😀", "x = {1: [2]}", "5 > 3 </b>"])
MESSAGES = st.builds(Said, PLAIN, PLAIN, st.lists(CALLS, max_size=3))
CUTS = st.lists(st.integers(0, 400), max_size=12)


@pytest.mark.parametrize("name", FORMATS)
@given(message=MESSAGES, cuts=CUTS)
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written_however_it_was_split(name: str, message: Said, cuts: list[int]) -> None:
    reasoning, calls = message.reasoning, message.calls
    message = Said(
        message.content, "" if name in WITHOUT_REASONING else reasoning, [] if name in WITHOUT_CALLS else calls
    )
    text = WRITERS[name](message)
    template = FAMILIES[name].template
    events = read(template, split(text, cuts))
    check(events)
    assert events == read(template, [text]) == read(template, list(text))
    assert all(event.complete for event in events if isinstance(event, CallEnded))
    assert said(events) == Said(message.content, message.reasoning, list(message.calls)), text


BEGINS = ["{}=", "{} =", "{} = ", '{} name="', "{}\nname = '", "{} name="]
BETWEEN = [", ", " ", ",", "][", "]\n[", "] [ ", ",]["]


@dataclass(frozen=True)
class Slips:
    """How a model writes a mark that the format writes otherwise. `between`: what stands between two calls of a
    list. `begin`: of a tag, in place of its name and `=`."""

    begin: str
    between: str

    def __call__(self, name: str, text: str) -> str:
        if name in ("mistral", "phi4"):
            return text.replace('}, {"name"', "}" + self.between + '{"name"')
        quote = self.begin[-1] if self.begin[-1] in "\"'" else ""
        attributes = ' type="string"' if quote else ""
        return re.sub(
            "(<parameter|<function)=([^>]+)>",
            lambda tag: f"{self.begin.format(tag[1])}{tag[2]}{quote}{attributes}>",
            text,
        )


SLIPS = st.builds(Slips, st.sampled_from(BEGINS), st.sampled_from(BETWEEN))


@pytest.mark.parametrize("name", ["qwen-xml", "mistral", "phi4"])
@given(message=MESSAGES, slips=SLIPS, cuts=CUTS)
@settings(max_examples=100, deadline=None)
def test_what_a_model_writes_otherwise_is_read_as_it_means_it(
    name: str, message: Said, slips: Slips, cuts: list[int]
) -> None:
    message = Said(message.content, "" if name in WITHOUT_REASONING else message.reasoning, message.calls)
    text, template = slips(name, WRITERS[name](message)), FAMILIES[name].template
    events = read(template, split(text, cuts))
    check(events)
    assert events == read(template, [text]) == read(template, list(text))
    assert said(events) == Said(message.content, message.reasoning, list(message.calls)), text


CALL = '{"name": "now"}'


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("mistral", f'[TOOL_CALLS][{CALL}][{{"x": 1}}] foo', '][{"x": 1}] foo'),
        ("mistral", f'[TOOL_CALLS][{CALL}, {{"x": 1}}] foo', ', {"x": 1}] foo'),
        ("mistral", f"[TOOL_CALLS][{CALL}] [see 1]", "[see 1]"),
        ("mistral", f"[TOOL_CALLS][{CALL}][", "["),
        ("mistral", f"[TOOL_CALLS][{CALL}][{{", "][{"),
        ("mistral", f"[TOOL_CALLS][{CALL},] foo", "foo"),
        ("phi4", f"functools[{CALL}] [a<|/tool_call|>", "[a"),
        ("gemma3", "[now(), 3] foo", ", 3] foo"),
        ("gemma3", "[now(), then()] foo", ", then()] foo"),
    ],
)
def test_behind_a_call_of_a_list_what_is_no_call_is_text(name: str, text: str, content: str) -> None:
    template = FAMILIES[name].template
    assert read(template, [text]) == read(template, list(text))
    assert said(read(template, [text])) == Said(content, "", [("now", {})])


def test_an_empty_list_of_calls_is_text_in_its_place() -> None:
    for text in ("[TOOL_CALLS][] foo", "[TOOL_CALLS] [ ]"):
        assert said(read(FAMILIES["mistral"].template, list(text))) == Said(text, "", [])


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_text_that_was_cut_or_corrupted_is_read_the_same_for_every_split(name: str, data: st.DataObject) -> None:
    message = data.draw(MESSAGES)
    text = data.draw(SLIPS)(name, WRITERS[name](message))
    for _ in range(data.draw(st.integers(0, 3))):
        at, what = data.draw(st.integers(0, len(text))), data.draw(LETTERS)
        text = text[:at] + what + text[at + data.draw(st.integers(0, 6)) :]
    text = text[: data.draw(st.integers(0, len(text)))]
    template = FAMILIES[name].template
    events = read(template, split(text, data.draw(CUTS)))
    check(events)
    assert events == read(template, [text]) == read(template, list(text))


TINY = Template(
    {
        "start_anchor": "A",
        "fields": {
            "reasoning_content": {"open": "<t>", "close": "</t>"},
            "tool_calls": {
                "open_pattern": r"\s*<(?P<name>n+)>",
                "close": "</",
                "content": "json",
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "!"},
        },
    }
)


@pytest.mark.parametrize("seed", range(40))
def test_all_splits_of_short_texts(seed: int) -> None:
    text = "".join(
        random.Random(seed).choices(["<", ">", "/", "n", "t", "<n>", "</", "{", "}", '"', " ", "!"], k=7)
    )[:9]
    whole = read(TINY, [text])
    check(whole)
    for cuts in itertools.product([False, True], repeat=len(text) - 1):
        pieces, rest = [], text[0]
        for cut, letter in zip(cuts, text[1:], strict=True):
            if cut:
                pieces.append(rest)
                rest = ""
            rest += letter
        assert read(TINY, [*pieces, rest]) == whole, (text, pieces)


@given(st.text(alphabet='<>/nt{}" !:A', max_size=30), CUTS)
@example("<n>{}<n></", [4])
def test_any_text_in_a_format_of_short_marks(text: str, cuts: list[int]) -> None:
    events = read(TINY, split(text, cuts))
    check(events)
    assert events == read(TINY, list(text))


@pytest.mark.parametrize(
    ("end", "text", "expected"),
    [
        (
            "<|im_start|>assistant\n<think>\n",
            "hm\n</think>\n\nYes",
            [ReasoningDelta("hm", 0), ContentDelta("Yes", 13)],
        ),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes", [ContentDelta("Yes", 0)]),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", " a", [ContentDelta(" a", 0)]),
        ("…user\nwhat is <think>", "x", [ReasoningDelta("x", 0)]),
        ("<|im_start|>assistant\nI am", " here", [ContentDelta(" here", 0)]),
    ],
)
def test_the_end_of_the_prompt_says_where_the_output_begins(end: str, text: str, expected: list[Event]) -> None:
    assert read(FAMILIES["hermes"].template, [text], end) == expected


def ended(index: int, complete: bool = True) -> CallEnded:
    return CallEnded(index, complete)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use <tool_call> here", [ContentDelta("use <tool_call> here", 0)]),
        ("<tool_call>{}</tool_call>", [ContentDelta("<tool_call>{}</tool_call>", 0)]),
        ('<tool_call>{"name": ""}', [ContentDelta('<tool_call>{"name": ""}', 0)]),
        ('a <tool_call>{"na', [ContentDelta('a <tool_call>{"na', 0)]),
        ('<tool_call>{"name": "now"}</tool_call>', [CallStarted(0, "now"), ArgumentsDelta(0, "{}"), ended(0)]),
        (
            '<tool_call>{"name": "now", "arguments": {"a": tru</tool_call> b',
            [CallStarted(0, "now"), ArgumentsDelta(0, '{"a": tru'), ended(0, False), ContentDelta("b", 62)],
        ),
        (
            '<tool_call>{"name": "now", "arguments": {"a": "\\u00e9\\',
            [CallStarted(0, "now"), ArgumentsDelta(0, '{"a": "\\u00e9\\'), ended(0, False)],
        ),
        (
            '<tool_call>{"arguments": {"a": 1}, "name": "now"}}</tool_call> b',
            [
                CallStarted(0, "now"),
                ArgumentsDelta(0, '{"a": 1}'),
                ended(0),
                ContentDelta("}", 49),
                ContentDelta(" b", 62),
            ],
        ),
        (
            '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
            [CallStarted(0, "now"), ArgumentsDelta(0, '{"a": 1}'), ended(0)],
        ),
        (
            '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
            [CallStarted(0, "now"), ArgumentsDelta(0, "[1]"), ended(0, False)],
        ),
        (
            '<tool_call>\n<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}</tool_call>',
            [ContentDelta("<tool_call>", 0), CallStarted(0, "now"), ArgumentsDelta(0, '{"a": "x\\ny"}'), ended(0)],
        ),
    ],
)
def test_the_rules_for_what_is_no_whole_call(text: str, expected: list[Event]) -> None:
    assert read(FAMILIES["hermes"].template, [text]) == read(FAMILIES["hermes"].template, list(text)) == expected


def test_without_tools_marks_of_calls_are_text_and_reasoning_is_divided() -> None:
    text = hermes(Said("Hi", "hm", [("now", {})]))
    parser = Parser(FAMILIES["hermes"].template)
    at = text.index("Hi")
    expected = [ReasoningDelta("hm", text.index("hm")), ContentDelta(text[at:], at)]
    assert joined([*parser.push(text), *parser.finish()]) == expected


def test_arguments_come_before_the_call_ends() -> None:
    parser = Parser(FAMILIES["qwen-xml"].template, tools=TOOLS)
    text = qwen_xml(Said(calls=[("get_weather", {"city": "Paris in spring"})]))
    events = parser.push(text[: text.index(" spring")])
    assert events[-1] == ArgumentsDelta(0, "Paris in")


@pytest.mark.parametrize(
    ("kind", "written", "meant"),
    [
        ("integer", "3.0", 3), ("number", "1e3", 1000.0), ("integer|null", "None", None), ("boolean", "True", 1),
        ("object", "{'a': [True, None]}", {"a": [True, None]}), ("array", "no", "no"), ("integer", "x", "x"),
        ("string", "3", "3"), ("any", "[1]", [1]), ("any", "x", "x"), ("null|string", "null", None),
        ("object", "[" * 100_000, "[" * 100_000),
    ],
)  # fmt: skip
def test_arguments_in_tags_have_the_types_of_their_tool(kind: str, written: str, meant: Any) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parser = Parser(FAMILIES["qwen-xml"].template, tools={"f": {"a": kind}})
    [(_, arguments)] = said(joined([*parser.push(text), *parser.finish()])).calls
    assert arguments == {"a": meant}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>\nDone."),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "1"},}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"a": "1"}, "name": "f",\n}\n</tool_call>Done.'),
    ],
)
def test_a_call_is_read_without_the_end_of_its_function_and_with_a_comma_too_many(name: str, text: str) -> None:
    parser = Parser(FAMILIES[name].template, tools={"f": {"a": "string"}})
    read_so = said(joined([event for letter in text for event in parser.push(letter)] + parser.finish()))
    assert read_so.calls == [("f", {"a": "1"})]
    assert read_so.content.strip() == ("Done." if "Done." in text else "")


def test_both_forms_of_deepseek_are_read() -> None:
    message = Said("a", "b", [("get_weather", {"city": "x"}), ("now", {})])
    assert said(read(FAMILIES["deepseek"].template, [deepseek_31(message)])) == message


def test_floods_of_spaces_and_half_marks_are_read_in_linear_time() -> None:
    """In the time that a test has; a quadratic search would take hours."""
    for text in (" " * 10**6, "<" * 10**5, "<tool_call>" * 10**4, '<tool_call>{"a":' * 10**4):
        for name in ("hermes", "qwen-xml", "harmony"):
            parser = Parser(FAMILIES[name].template, tools=TOOLS)
            for begin in range(0, len(text), 997):
                parser.push(text[begin : begin + 997])
            parser.finish()


WEATHER = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
WHOLE = [
    f"```json\n{WEATHER}\n```",
    f"\n```json\n{WEATHER}\n```\n<|im_end|>",
    f"```\n{WEATHER}```",
    f"<think>\nHm.\n</think>\n\n```json\n[{WEATHER}]\n```",
    WEATHER,
    '```json\n{\n  "arguments": {"city": "Rome"},\n  "name": "get_weather"\n}\n```',
    f"[{WEATHER}]",
    f"[{WEATHER}]\n",
]
NOT_WHOLE = [
    f"Here:\n```json\n{WEATHER}\n```",
    f"```json\n{WEATHER}\n```\nThat is the call.",
    f"```json\n{WEATHER}",
    f"```json\n{WEATHER}\n```\n```json\n{WEATHER}\n```",
    '```json\n{"name": "other", "arguments": {}}\n```',
    '```json\n{"name": "get_weather"}\n```',
    '```json\n{"name": "get_weather", "arguments": [1]}\n```',
    '```json\n{"city": "Rome"}\n```',
    "```python\nprint()\n```",
    "`get_weather` is a tool",
    "{}",
    f"[{WEATHER}][",
    f"[{WEATHER}] and more",
]


@pytest.mark.parametrize("name", ["hermes", "qwen-xml"])
@pytest.mark.parametrize("text", WHOLE)
def test_a_whole_message_of_json_that_names_a_tool_is_a_call(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = said(read(FAMILIES[name].template, pieces))
        assert found == Said("", "Hm." if "think" in text else "", [("get_weather", {"city": "Rome"})])


@pytest.mark.parametrize("text", NOT_WHOLE)
def test_other_messages_with_such_a_block_stay_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert said(read(FAMILIES["hermes"].template, pieces)) == Said(text, "", [])


def test_text_that_cannot_be_a_call_is_told_at_once() -> None:
    parser = Parser(FAMILIES["hermes"].template, tools=TOOLS)
    assert parser.push("```json\n{") == []
    assert joined(parser.push('"city"')) == [ContentDelta('```json\n{"city"', 0)]
    assert parser.push(": 1") == [ContentDelta(": 1", 15)]


def test_a_message_that_the_prompt_has_begun_is_no_whole_one() -> None:
    events = read(FAMILIES["hermes"].template, [WEATHER], prompt_end="<|im_start|>assistant\nThe call: ")
    assert said(events) == Said(WEATHER, "", [])


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"hermes", "qwen-xml", "llama"}))
def test_other_formats_read_such_a_message_as_text(name: str) -> None:
    text = f"```json\n{WEATHER}\n```"
    assert said(read(FAMILIES[name].template, [text])).calls == []
