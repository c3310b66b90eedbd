"""A real model that was taught to call tools, through a worker and the gateway, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from petiole.tasks.fleet import models
from tests.real.models import fetched, wanted
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

pytestmark = [pytest.mark.real, pytest.mark.e2e]

CODERS = [name for name in wanted() if name in ("q05", "q15")]


def tool(name: str, about: str, **parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": [*parameters], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


NUMBER = {"type": "integer"}
TOOLS: Any = [
    tool("get_weather", "The weather in a city now", city={"type": "string", "maxLength": 40}),
    tool("add", "Add two integers", a=NUMBER, b=NUMBER),
]
QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("How is the weather in Rome?", "get_weather", {"city": "Rome"}),
    ("Use the tool to add 17 and 25.", "add", {"a": 17, "b": 25}),
    ("What's the weather like in Oslo right now?", "get_weather", {"city": "Oslo"}),
    ("Please add 1200 and 34 with the tool.", "add", {"a": 1200, "b": 34}),
    ("Is it raining in Lisbon?", "get_weather", {"city": "Lisbon"}),
    ("Compute 3 + 4 with the add tool.", "add", {"a": 3, "b": 4}),
    ("Weather in Berlin please", "get_weather", {"city": "Berlin"}),
    ("Add -5 and 8 using your tool.", "add", {"a": -5, "b": 8}),
    ("Tell me the weather in Tokyo.", "get_weather", {"city": "Tokyo"}),
    ("Sum 99 and 1 with add.", "add", {"a": 99, "b": 1}),
]


@pytest.fixture(scope="module", params=CODERS)
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    engine = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_MODEL": str(fetched(request.param)),
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_MAX_NUM_SEQS": 10,
        "PETIOLE_MAX_MODEL_LEN": 2048,
    }
    folder = tmp_path_factory.mktemp("real")
    with Site(folder, **engine) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has loaded the model", 900)
        with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=site.url) as gateway:
            yield openai.OpenAI(base_url=gateway.url, api_key="none", timeout=1800, max_retries=0)


def calls(client: openai.OpenAI, choice: Any) -> list[bool | None]:
    """For each question whether the call is the right one; None: there was no call."""
    model = client.models.list().data[0].id

    def right(asked: tuple[str, str, dict[str, Any]]) -> bool | None:
        question, name, arguments = asked
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            tools=TOOLS,
            tool_choice=choice,
            temperature=0,
            max_tokens=60,
        )
        found: Any = answer.choices[0].message.tool_calls or []
        if not found:
            return None
        return (found[0].function.name, json.loads(found[0].function.arguments)) == (name, arguments)

    with ThreadPoolExecutor(10) as executor:
        return list(executor.map(right, QUESTIONS))


def test_it_calls_the_right_tool_unforced(client: openai.OpenAI) -> None:
    assert calls(client, "auto").count(True) >= 9


def test_it_calls_a_tool_where_it_must(client: openai.OpenAI) -> None:
    found = calls(client, "required")
    assert None not in found
    assert found.count(True) >= 9


def test_a_call_that_does_not_fit_is_refused_with_the_number(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"must be at least [0-9]+, the tokens of the shortest"):
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": QUESTIONS[0][0]}],
            tools=TOOLS,
            tool_choice="required",
            max_tokens=4,
        )
