"""openai-agents: an agent over either interface, whole and streamed."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)
ASKED = "Count from 1 to 5."


async def main() -> None:
    client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="petiole-tiny", openai_client=client)
        agent = Agent(name="counter", model=model, model_settings=ModelSettings(temperature=0))
        whole = (await Runner.run(agent, ASKED)).final_output
        assert "1, 2, 3" in whole, whole
        run = Runner.run_streamed(agent, ASKED)
        async for _ in run.stream_events():
            pass
        assert run.final_output == whole


asyncio.run(main())
print("fine")
