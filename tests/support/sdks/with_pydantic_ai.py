"""pydantic-ai: an agent over either interface, whole and streamed, and an output type."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int


async def streamed(agent: Agent) -> str:
    async with agent.run_stream("Count from 1 to 5.") as run:
        return await run.get_output()


provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    profile = OpenAIModelProfile(supports_json_schema_output=True)
    agent = Agent(kind("petiole-tiny", provider=provider, profile=profile), model_settings={"temperature": 0})
    whole = agent.run_sync("Count from 1 to 5.").output
    assert "1, 2, 3" in whole, whole
    assert asyncio.run(streamed(agent)) == whole
    about = "Extract name and age as JSON: Ana is 31."
    assert isinstance(agent.run_sync(about, output_type=NativeOutput(Person)).output, Person)
print("fine")
