"""A call that must come has room within `max_tokens`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.gpu_worker import Constraint, Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.request import Result
from petiole.tasks.output_parsing.writing import WRITINGS, composed

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Reykjavik"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "parameters": CITY}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model="petiole-tiny-tools", device="cpu", dtype="float32")) as found:
        yield found


def called(engine: Engine, prompt: str, max_tokens: Any, **options: Any) -> Result:
    value = composed(WRITINGS["hermes"], [TOOL], least=1, most=1, answer=None, **options)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    request = Request(prompt=prompt, constraint=Constraint("calls", value), sampling=sampling)
    return engine.submit(request).result(60)


def least(engine: Engine) -> int:
    with pytest.raises(InvalidRequest) as caught:
        called(engine, "Weather?", 1)
    message = str(caught.value)
    assert "the tokens of the shortest call" in message
    found = re.search(r"must be at least (\d+)", message)
    assert found is not None
    return int(found[1])


def test_a_limit_below_the_shortest_call_is_refused_with_the_number(engine: Engine) -> None:
    n = least(engine)
    with pytest.raises(InvalidRequest, match=f"must be at least {n}, .*, got {n - 1}"):
        called(engine, "Weather?", n - 1)
    assert called(engine, "Weather?", n).text.startswith("<tool_call>"), "with no room for a thought there is none"


@pytest.mark.parametrize("asked", [None, 3, 1_000])
def test_a_thought_ends_where_the_call_needs_the_rest(engine: Engine, asked: int | None) -> None:
    result = called(engine, "Weather?<think>\n", 2 * least(engine) + 24, budget=asked)
    thought, _, call = result.text.partition("</think>")
    assert thought
    assert call.strip().startswith("<tool_call>")
    assert (result.text.endswith("</tool_call>"), result.finish_reason) == (True, "stop")
