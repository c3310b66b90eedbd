"""The arguments of calls come back as they were written: of every type, under every name, with any content."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.output_parsing.parser import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    Parser,
    joined,
)
from petiole.tasks.output_parsing.types import Schema, parameters_of, types_of
from tests.support.tools import calls, same
from tests.support.written import WITHOUT_CALLS, WRITERS, Said

FORMATS = sorted(FAMILIES.keys() - WITHOUT_CALLS)


def events_of(name: str, pieces: list[str], tools: list[dict[str, Any]]) -> list[Event]:
    end = "<|start|>assistant" if name == "harmony" else ""
    parser = Parser(FAMILIES[name].template, tools=types_of(tools), prompt_end=end)
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


def read(name: str, text: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls, of which each must be complete."""
    events = events_of(name, [text], tools)
    assert all(event.complete for event in events if isinstance(event, CallEnded)), text
    names = [event.name for event in events if isinstance(event, CallStarted)]
    return list(
        zip(names, [json.loads(one.text) for one in events if isinstance(one, ArgumentsDelta)], strict=True)
    )


def tool(schema: Any, name: str = "t", key: str = "v", **more: Any) -> dict[str, Any]:
    properties = {key: schema, **more}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "$defs": DEFS}}


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_a_template_writes_is_read_at_every_cut(name: str, data: st.DataObject) -> None:
    template = FAMILIES[name].template

    def key(name: str) -> bool:
        return template.carries_key(name, inside=False)

    drawn = data.draw(calls(template.carries_name, key))
    text = WRITERS[name](Said(calls=[(drawn.name, drawn.arguments)]))
    [(called, arguments)] = read(name, text, drawn.tools)
    assert called == drawn.name
    assert same(arguments, drawn.arguments), text
    events = events_of(name, [text], drawn.tools)
    assert events_of(name, list(text), drawn.tools) == events
    for cut in range(0, len(text), 1 + len(text) // 40):
        assert events_of(name, [text[:cut], text[cut:]], drawn.tools) == events


DEFS = {
    "Model": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Year": {"type": "string", "enum": ["2023", "2024"]},
    "Flag": {"type": "boolean"},
    "Again": {"anyOf": [{"$ref": "#/$defs/Again"}, {"type": "integer"}]},
}
NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "kinds", "listed"),
    [
        ({"type": "number"}, "number", None),
        ({"type": ["integer", "null"]}, "null|integer", None),
        ({"$ref": "#/$defs/Model"}, "object", None),
        ({"anyOf": [{"$ref": "#/$defs/Model"}, NULL]}, "null|object", None),
        ({"anyOf": [{"$ref": "#/$defs/Year"}, NULL]}, "null|string", ("2023", "2024", None)),
        ({"anyOf": [{"$ref": "#/$defs/Flag"}, NULL]}, "null|boolean", (False, True, None)),
        ({"allOf": [{"$ref": "#/$defs/Year"}, {"const": "2024"}]}, "string", ("2024",)),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "integer", None),
        ({"enum": ["a", 1, None]}, "null|integer|string", ("a", 1, None)),
        ({"const": 1.5}, "number", (1.5,)),
        ({"$ref": "#/$defs/Again"}, "any", None),
        ({"$ref": "#/$defs/None"}, "any", None),
        ({"$ref": "elsewhere"}, "any", None),
        ({}, "any", None),
        (True, "any", None),
        (False, "any", ()),
        ({"type": "no such type", "enum": 7, "anyOf": 3}, "any", None),
    ],
)
def test_which_values_a_schema_allows(schema: Any, kinds: str, listed: tuple[Any, ...] | None) -> None:
    found = Schema({"$defs": DEFS}).values(schema)
    assert found.named == kinds
    assert found.listed == listed


def test_a_schema_that_doubles_or_never_ends_is_read_in_no_time() -> None:
    defs: dict[str, Any] = {"R0": {"type": "string"}}
    for k in range(1, 400):
        defs[f"R{k}"] = {"anyOf": [{"$ref": f"#/$defs/R{k - 1}"}, {"allOf": [{"$ref": f"#/$defs/R{k - 1}"}]}]}
    last = {"$ref": "#/$defs/R399"}
    assert Schema({"$defs": defs}).values(last).named in ("string", "any")
    nested: Any = {"type": "string"}
    for _ in range(20_000):
        nested = {"allOf": [nested]}
    assert Schema(nested).values(nested).named == "any"


def test_parameters_are_found_behind_references_and_in_all_parts() -> None:
    schema = {
        "$ref": "#/$defs/Own",
        "allOf": [{"properties": {"a": {"const": 1}, "b": {}}, "required": ["b"]}],
        "$defs": {"Own": {"properties": {"a": {"type": ["integer", "string"]}}, "required": ["a", 7]}},
    }
    found = parameters_of(schema)
    assert found.needed == {"a", "b"}
    assert types_of([{"name": "t", "parameters": schema}]) == {"t": {"a": "integer", "b": "any"}}
    assert types_of([{"function": {"name": "t"}}, {"name": 7}]) == {"t": {}}


def xml(value: str, key: str = "v") -> str:
    return f"<tool_call>\n<function=t>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def glm(value: str, key: str = "v", name: str = "t") -> str:
    return f"<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("name", "written"), [("qwen-xml", xml), ("glm-xml", glm)])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Model"}, NULL]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Flag"}, NULL]}, "True", True),
        ({"anyOf": [{"$ref": "#/$defs/Flag"}, NULL]}, "None", None),
        ({"anyOf": [{"$ref": "#/$defs/Year"}, NULL]}, "2024", "2024"),
        ({"anyOf": [{"$ref": "#/$defs/Year"}, NULL]}, '"2024"', "2024"),
        ({"$ref": "#/$defs/Year"}, "2024", "2024"),
        ({"allOf": [{"type": "string"}]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"anyOf": [{"enum": [1, 2]}, NULL]}, "1", 1),
        ({"type": "string"}, '"1"', '"1"'),
        ({"type": "integer"}, '"5"', 5),
        ({"type": "object"}, '"{\\"x\\": 1}"', {"x": 1}),
        ({"type": "boolean"}, '"maybe"', "maybe"),
    ],
)
def test_arguments_in_tags_have_the_types_of_the_schema(
    name: str, written: Any, schema: Any, text: str, value: Any
) -> None:
    [(_, arguments)] = read(name, written(text), [tool(schema)])
    assert same(arguments, {"v": value})


INT, STR = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("glm-xml", glm("1", "a b"), "a b"),
        ("qwen-xml", xml("1", "a b"), "a b"),
        *(
            ("gemma4", f"<|tool_call>call:t{{{key}:1}}<tool_call|>", key)
            for key in ("ä", "日", "a b", "$a", "a:b")
        ),
        *(("gemma3", f"[t({key}=1)]", key) for key in ("日", "ärz", "a b", "$a", "9")),
    ],
)
def test_a_parameter_has_its_name_in_every_format(name: str, text: str, key: str) -> None:
    assert read(name, text, [tool(INT, key=key)]) == [("t", {key: 1})]
    longer = tool(INT, key=f"{key} more", **{key: INT})
    assert read(name, text, [longer]) == [("t", {key: 1})]


def test_keys_without_quotes_are_names_of_any_letters() -> None:
    text = "<|tool_call>call:t{v:{a b:1,ä:2,größe :3}}<tool_call|>"
    assert read("gemma4", text, [tool({"type": "object"})]) == [("t", {"v": {"a b": 1, "ä": 2, "größe": 3}})]


SPACED = {
    "glm-xml": glm("1", name="a b"),
    "gemma4": "<|tool_call>call:a b{v:1}<tool_call|>",
    "mistral-args": '[TOOL_CALLS]a b[ARGS]{"v": 1}',
    "deepseek": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>a b\n```json\n{"v": 1}\n```<｜tool▁call▁end｜>',
    "deepseek-3.1": '<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{"v": 1}<｜tool▁call▁end｜>',
    "harmony": '<|channel|>commentary to=functions.a b <|constrain|>json<|message|>{"v": 1}<|call|>',
}


@pytest.mark.parametrize("name", sorted(SPACED))
def test_a_tool_with_a_space_in_its_name_is_called_and_no_other(name: str) -> None:
    text = SPACED[name]
    assert read(name, text, [tool(INT, "a"), tool(INT, "a b")]) == [("a b", {"v": 1})]
    assert read(name, text, [tool(INT, "a")]) == []
    assert not any(isinstance(event, CallStarted) for event in events_of(name, [text], [tool(INT, "a")]))


TWO = [tool(STR, key="p", q=STR)]


@pytest.mark.parametrize("end", ["</parameter>", "\n</parameter>\n", "</function>\n</tool_call>", "<parameter=x>"])
def test_the_end_of_a_value_is_text_where_nothing_follows_that_may(end: str) -> None:
    assert read("qwen-xml", xml(f"a {end} b", "p"), TWO) == [("t", {"p": f"a {end} b"})]
    text = xml(f"a {end} b", "p").replace("</function>", "<parameter=q>\nc\n</parameter>\n</function>", 1)
    if "</function>" not in end:
        assert read("qwen-xml", text, TWO) == [("t", {"p": f"a {end} b", "q": "c"})]
    glm_end = end.replace("parameter", "arg_value").replace("</function>\n", "")
    assert read("glm-xml", glm(f"a {glm_end} b", "p"), TWO) == [("t", {"p": f"a {glm_end} b"})]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<parameter=p>\na\n<parameter=q>\nb\n</parameter>\n</function>\n</tool_call>", {"p": "a", "q": "b"}),
        ("<parameter=p>a<parameter=q>b</function></tool_call>", {"p": "a", "q": "b"}),
        ("<parameter=p>\na\n</parameter>\n</function>", {"p": "a"}),
        ("<parameter=p>\na\n</parameter>\n</func", {"p": "a"}),
        ('<parameter="p">\na\n</parameter>\n</function>\n</tool_call>', {"p": "a"}),
        ("<parameter= p >\na\n</parameter>\n</function>\n</tool_call>", {"p": "a"}),
        ("<parameter='other'>\na\n</parameter>\n</function>\n</tool_call>", {"other": "a"}),
        ("<parameter name='other'>\na\n</parameter>\n</function>\n</tool_call>", {"other": "a"}),
        ('<parameter name="p">\na\n<parameter name="q">\nb\n</parameter>\n</function>', {"p": "a", "q": "b"}),
        (
            '<parameter=p>\na\n</parameter>\n<parameter name="q">\nb\n</parameter>\n</function>',
            {"p": "a", "q": "b"},
        ),
    ],
)
@pytest.mark.parametrize("function", ["t", '"t"', " t "])
def test_slips_in_tags(function: str, text: str, arguments: dict[str, str]) -> None:
    whole = f"<tool_call>\n<function={function}>\n{text}"
    assert read("qwen-xml", whole, TWO) == [("t", arguments)]
    assert events_of("qwen-xml", list(whole), TWO) == events_of("qwen-xml", [whole], TWO)


@pytest.mark.parametrize("begin", ['<parameter name="p">', '<parameter name="x">', "<parameter = x>"])
def test_a_value_may_be_xml_that_has_parameters(begin: str) -> None:
    """A tag that is not written in the format's own way ends a value only if it begins an argument that is due."""
    value = f"<f>{begin}1</parameter>\n{begin}2</parameter></f>"
    text = xml(value, "p").replace("</function>", '<parameter name="q">\nb\n</parameter>\n</function>', 1)
    assert read("qwen-xml", xml(value, "p"), TWO) == [("t", {"p": value})]
    assert read("qwen-xml", text, TWO) == [("t", {"p": value, "q": "b"})]
    assert events_of("qwen-xml", list(text), TWO) == events_of("qwen-xml", [text], TWO)


def test_an_end_that_is_missing_before_another_call() -> None:
    text = "<tool_call>\n<function=t>\n<parameter=p>\na\n</function>\n</tool_call>\n"
    assert read("qwen-xml", text + xml("b", "q"), TWO) == [("t", {"p": "a"}), ("t", {"q": "b"})]
    text = "<tool_call>t\n<arg_key>p</arg_key>\n<arg_value>a\n<arg_key>q</arg_key>\n<arg_value>b</arg_value>\n"
    assert read("glm-xml", text + "</tool_call>", TWO) == [("t", {"p": "a\n", "q": "b"})]


def test_what_is_cut_off_is_not_complete() -> None:
    for text in ("<parameter=p>\na", "<parameter=p>\na\n</para", "<parameter=p>\na\n</parameter>\n<", ""):
        events = events_of("qwen-xml", [f"<tool_call>\n<function=t>\n{text}"], TWO)
        assert events[-1] == CallEnded(0, False)


def test_a_list_without_commas_has_all_its_calls() -> None:
    calls = [{"name": "t", "arguments": {"v": k}} for k in range(3)]
    text = " ".join(map(json.dumps, calls))
    assert read("mistral", f"[TOOL_CALLS][{text}]", [tool(INT)]) == [("t", {"v": k}) for k in range(3)]
    assert read("phi4", f"<|tool_call|>[{text}]<|/tool_call|>", [tool(INT)]) == [("t", {"v": k}) for k in range(3)]


@pytest.mark.parametrize("role", ["assistant", "<|start|>assistant", "<|start|>assistantassistant"])
def test_a_role_that_comes_twice_is_no_text(role: str) -> None:
    call = '<|channel|>commentary to=functions.t <|constrain|>json<|message|>{"v": 1}<|call|>'
    assert read("harmony", role + call, [tool(INT)]) == [("t", {"v": 1})]
    assert not any(isinstance(event, ContentDelta) for event in events_of("harmony", [role + call], [tool(INT)]))
    events = events_of(
        "harmony", [f"{role}<|channel|>analysis<|message|>hm<|end|>{role}<|channel|>final<|message|>Hi"], []
    )
    assert [event.text for event in events if hasattr(event, "text")] == ["hm", "Hi"]
