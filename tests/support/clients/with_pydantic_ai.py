# /// script
# dependencies = ["pydantic-ai-slim[openai]"]
# ///
"""pydantic-ai: an agent over either interface."""

import steps
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from steps import COUNTED, SHORT

provider = OpenAIProvider(base_url=steps.URL, api_key="none")
profile = OpenAIModelProfile(supports_json_schema_output=True)


class Person(BaseModel):
    name: str
    age: int


def _agents(model=steps.MODEL, **more):
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        made = kind(model, provider=provider, profile=profile)
        yield Agent(made, model_settings={"temperature": 0}, **more)


async def chat():
    for agent in _agents():
        assert (await agent.run(SHORT)).output == COUNTED


async def stream():
    for agent in _agents():
        async with agent.run_stream(SHORT) as run:
            assert [piece async for piece in run.stream_text()][-1] == COUNTED


async def tools():
    asked = []

    def weather(city: str) -> str:
        """How warm a city is."""
        asked.append(city)
        return '{"celsius": 20}'

    for agent in _agents(steps.SCRIPTED, tools=[weather]):
        asked.clear()
        assert (await agent.run(steps.THREE_ROUNDS)).output == steps.AFTER_THREE_ROUNDS
        assert asked == ["Rome", "Oslo", "Lima"]


async def structured():
    for kind in (NativeOutput, ToolOutput):
        for agent in _agents(output_type=kind(Person)):
            assert isinstance((await agent.run(steps.ABOUT_ANA)).output, Person)


async def abort():
    for agent in _agents(steps.SCRIPTED):
        async with agent.run_stream(steps.ENDLESS) as run:
            await anext(aiter(run.stream_text()))
            steps.wait_until_running()
            await run.cancel()
        await steps.idle()


async def error():
    for agent in _agents():
        with steps.refused(ModelHTTPError, by=steps.TOO_MANY_TOKENS):
            await agent.run(steps.TOO_LONG)


resume = steps.lacks("asks anew")
steps.run(globals())
