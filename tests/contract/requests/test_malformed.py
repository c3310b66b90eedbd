"""A malformed request of any kind is refused as `InvalidRequest`, wherever it is read: nothing else is raised."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.generation import ChatRequest, in_json
from petiole.contract.requests.validation import validate
from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.options import affinity_headers, apart, parse
from petiole.tasks.worker.generation.engine_requests import engine_request

CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}

texts = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["user", "text", "image", "\ud800", "data:;base64,", "é"]
)
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**63, float("nan")])
plain = st.none() | st.booleans() | numbers | texts | st.binary(max_size=8)
odd = st.sampled_from(
    [object(), int, ChatRequest, {1}, (1,), ValueError("x"), 1j, bytearray(b"x"), memoryview(b"x")]
)
keys = st.sampled_from(["role", "content", "type", "text", "image_url", "image", "url", "tool_calls"]) | texts
anything: st.SearchStrategy[Any] = st.recursive(
    plain | odd,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.integers() | st.none(), inner, max_size=4)
    ),
    max_leaves=12,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool"]) | anything,
            "content": st.lists(st.dictionaries(keys, anything, max_size=3), max_size=3) | anything,
            "tool_calls": st.just([CALL]) | anything,
        },
    )
    | anything,
    max_size=4,
)


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, list[Any], dict[str, Any]]:
    name = draw(st.sampled_from(sorted(TASKS)))
    options = draw(st.lists(st.sampled_from(sorted(TASKS[name].request.model_fields)) | texts, max_size=4))
    given_ = {option: draw(messages if option == "messages" else anything) for option in options}
    return name, draw(st.lists(anything, max_size=2)), given_


def read(name: str, args: list[Any], options: dict[str, Any]) -> None:
    """What a producer does with a request, and then a worker."""
    with contextlib.suppress(InvalidRequest):
        request, _ = apart(options)
        request = in_json(request)
        affinity_headers(parse(name, args, request))
    with contextlib.suppress(InvalidRequest):
        parsed = parse(name, args, options)
        engine_request("1", parsed)


@settings(max_examples=200, deadline=None)
@given(requests())
def test_nothing_but_invalid_request_is_raised(request: tuple[str, list[Any], dict[str, Any]]) -> None:
    read(*request)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_deep_nesting_is_refused(name: str) -> None:
    for option in TASKS[name].request.model_fields:
        for form in (
            lambda nested: nested,
            lambda nested: [{"role": "user", "content": nested}],
            lambda nested: {"x": nested},
        ):
            read(name, [], {option: form(deep(100))})
    read(name, [deep(100)], {})


@pytest.mark.parametrize("option", ["prompt", "messages", "stop", "unknown"])
def test_nesting_deeper_than_any_stack_is_refused(option: str) -> None:
    nested = deep(20_000)
    for value in (nested, [{"role": "user", "content": nested}], {"x": nested}):
        read("tasks.generate", [], {option: value})
    read("tasks.generate", [nested], {})


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_tool_call_needs_no_content(content: dict[str, Any]) -> None:
    said = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    request = validate(ChatRequest, {"messages": said})
    assert request.messages == said
    assert request.subject()["messages"] == said


class Text(str):
    """That a weak reference can watch."""


@pytest.mark.parametrize(
    ("kind", "field", "more"),
    [
        ("tasks.generate", "prompt", {}),
        ("tasks.generate", "prompt", {"temperature": -1}),
        ("tasks.generate", "prompt", {"temperatur": 1}),
        ("tasks.chat", "system", {"messages": [{"role": "user", "content": "x" * 4_000_001}]}),
    ],
)
def test_what_is_refused_is_free_at_once(kind: str, field: str, more: dict[str, Any]) -> None:
    """A search for cycles comes late, and large requests could fill the memory before."""
    gc.collect()
    gc.disable()
    try:
        text = Text("x" * 4_000_001)
        watched = weakref.ref(text)
        options = {field: text, **more}
        del text
        refused = False
        try:
            validate(TASKS[kind].request, options)
        except InvalidRequest:  # `pytest.raises` would keep it, with its frames
            refused = True
        del options
        assert refused
        assert watched() is None
    finally:
        gc.enable()
