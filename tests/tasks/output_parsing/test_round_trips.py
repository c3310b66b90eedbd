"""What a chat template has rendered is parsed, and rendered again: the same text, so the same tokens, in every
family; and the second round, with the tool's result, goes on from there. Each format is found by its template."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from petiole.gpu_worker.text.chat import ChatTemplate
from petiole.tasks.output_parsing import formats, message
from petiole.tasks.output_parsing.formats import FAMILIES
from tests.support.chat_templates import STYLES
from tests.support.written import WITHOUT_CALLS, WITHOUT_REASONING

PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "exact": {"type": "boolean"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": given}}}
    for name, given in (("get_weather", PARAMETERS), ("now", {}))
]
TYPES = {"get_weather": {name: one["type"] for name, one in PARAMETERS.items()}, "now": {}}
ASKED = [{"role": "user", "content": "How warm is it?"}]
CITIES = ("Paris", "São Paulo", "a\nb", 'say "no"', "</tool_call>", "{1: [2]}", "3")
ONE_CALL = {"harmony"}


def drawn(name: str, seed: int) -> dict[str, Any]:
    """A message of the assistant that this family can write."""
    rng = random.Random(seed)
    calls = []
    for _ in range(0 if name in WITHOUT_CALLS else 1 if name in ONE_CALL else rng.randint(1 if seed else 0, 2)):
        given: dict[str, Any] = {
            "city": rng.choice(CITIES),
            "days": rng.randint(-3, 9),
            "exact": rng.random() < 0.5,
        }
        kept = rng.sample(list(given), rng.randint(0, 3))
        function = {"name": "get_weather", "arguments": {key: given[key] for key in kept}}
        calls.append(function if rng.random() < 0.7 else {"name": "now", "arguments": {}})
    said: dict[str, Any] = {"role": "assistant"}
    if name not in WITHOUT_REASONING and rng.random() < 0.6:
        said["reasoning_content"] = rng.choice(("It is warm.", "hm\n\nno é"))
    said["content"] = rng.choice(("", "I look.", "Let me see: 1 < 2")) if name not in ONE_CALL else ""
    if not calls and not said["content"]:
        said["content"] = "It is warm."
    if calls:
        said["tool_calls"] = [
            {"id": f"abcdefgh{k}", "type": "function", "function": one} for k, one in enumerate(calls)
        ]
    return said


def parsed(name: str, text: str, prompt_end: str) -> dict[str, Any]:
    """The text as a message that a client sends back: arguments are text, as in OpenAI's API."""
    read = message.read(FAMILIES[name], text, prompt_end=prompt_end, tools=TYPES)
    assert all(call.complete for call in read.calls)
    said: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.reasoning:
        said["reasoning_content"] = read.reasoning
    if read.calls:
        said["tool_calls"] = [
            {
                "id": f"abcdefgh{k}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for k, call in enumerate(read.calls)
        ]
    return said


@pytest.mark.parametrize("name", sorted(STYLES))
def test_rendered_parsed_and_rendered_again_is_the_same(name: str) -> None:
    style = STYLES[name]
    template = ChatTemplate({"default": style.source}, {})
    assert FAMILIES.keys() == STYLES.keys()
    prompt = template.render(ASKED, TOOLS)
    for seed in range(12):
        said = drawn(name, seed)
        whole = template.render([*ASKED, said], TOOLS, add_generation_prompt=False)
        assert whole.startswith(prompt)
        output = whole[len(prompt) :].removesuffix(style.end)
        again = parsed(name, output, prompt[-64:])
        assert template.render([*ASKED, again], TOOLS, add_generation_prompt=False) == whole
        if "tool_calls" in said:
            answered = {"role": "tool", "tool_call_id": "abcdefgh0", "content": "20 degrees"}
            second = template.render([*ASKED, again, answered], TOOLS)
            assert second == template.render([*ASKED, said, answered], TOOLS)
            assert second.startswith(whole)
            assert "20 degrees" in second[len(whole) :]


@pytest.mark.parametrize("name", sorted(STYLES.keys() - {"think", "gemma3"}))
def test_a_format_is_found_by_the_marks_of_its_template(name: str) -> None:
    found = formats.of_checkpoint({"chat_template": STYLES[name].source})
    assert found is not None
    assert found.name == name


def test_how_a_format_is_found() -> None:
    def name(**described: Any) -> str | None:
        found = formats.of_checkpoint(described)
        return found and found.name

    own = {"fields": {"content": {}, "thinking": {"open": "<t>", "close": "</t>"}}}
    assert name() is None
    assert name(chat_template="{{ messages }}") is None
    assert name(chat_template="<think>") == "think"
    assert name(chat_template="<start_of_turn>") == "gemma3"
    assert name(chat_template="<|im_start|>", tool_format="qwen3_coder") == "qwen-xml"
    assert name(chat_template="<tool_call>", tool_format="one of tomorrow") == "hermes"
    made = formats.of_checkpoint({"chat_template": "<tool_call>", "response_template": own})
    assert made is not None
    assert made.template.has_reasoning
    assert not made.template.has_calls
    assert made.announced == own
    assert name(chat_template="<tool_call>", response_template={"fields": {"content": {"open": 7}}}) == "hermes"
    assert formats.named("no such format") is None
    assert formats.named(json.loads(json.dumps(own))) is not None
