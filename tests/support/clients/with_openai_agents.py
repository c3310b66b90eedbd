# /// script
# dependencies = ["openai-agents"]
# ///
"""OpenAI's Agents SDK: an agent over either interface."""

import contextlib
import io
import re
from pathlib import Path

import agents
import openai
import steps
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel
from steps import COUNTED, SHORT

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """How warm a city is."""
    return '{"celsius": 20}'


def _agents(model=steps.MODEL, **more):
    client = openai.AsyncOpenAI(base_url=steps.URL, api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        made = kind(model=model, openai_client=client)
        yield Agent(name="agent", model=made, model_settings=ModelSettings(temperature=0), **more)


async def chat():
    for agent in _agents():
        assert (await Runner.run(agent, SHORT)).final_output == COUNTED


async def stream():
    for agent in _agents():
        run = Runner.run_streamed(agent, SHORT)
        events = [event async for event in run.stream_events()]
        assert len(events) > 5
        assert run.final_output == COUNTED


async def tools():
    for agent in _agents(steps.SCRIPTED, tools=[weather]):
        run = await Runner.run(agent, steps.THREE_ROUNDS)
        assert run.final_output == steps.AFTER_THREE_ROUNDS
        assert len(run.raw_responses) == 4
    for agent in _agents(tools=[weather]):
        run = await Runner.run(agent, "How warm is it in Rome?")
        assert "20 degrees in Rome" in run.final_output, run.final_output


async def structured():
    for agent in _agents(output_type=Person):
        assert (await Runner.run(agent, steps.ABOUT_ANA)).final_output == Person(name="Ana", age=31)


async def abort():
    for agent in _agents(steps.SCRIPTED):
        run = Runner.run_streamed(agent, steps.ENDLESS)
        async for _ in run.stream_events():
            run.cancel()
        await steps.idle()


async def error():
    for agent in _agents():
        with steps.refused(openai.BadRequestError, by=steps.TOO_MANY_TOKENS):
            await Runner.run(agent, steps.TOO_LONG)


resume = steps.lacks("asks anew")


def documented():
    """The example of docs/tools.md, as it is printed."""
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    [code] = [block for block in blocks if "agents.Agent(" in block]

    def weather(city: str) -> dict[str, int]:
        return {"celsius": 20}

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(
            code.replace("http://127.0.0.1:8000/v1", steps.URL),
            {"agents": agents, "openai": openai, "weather": weather},
        )
    assert printed.getvalue() == "It is 20 degrees in Rome.\n"


steps.run(globals())
