"""pydantic-ai: an agent's output is a tool that must be called, whole and streamed, over either interface."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    warm: bool


ASKED = "How is the weather in Rome?"


async def streamed(agent: Agent) -> Weather:
    async with agent.run_stream(ASKED) as run:
        return await run.get_output()


provider = OpenAIProvider(base_url=sys.argv[1], api_key="none")
settings = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("tooled", provider=provider), output_type=ToolOutput(Weather), model_settings=settings)
    whole = agent.run_sync(ASKED).output
    assert isinstance(whole, Weather)
    assert asyncio.run(streamed(agent)) == whole
print("fine")
