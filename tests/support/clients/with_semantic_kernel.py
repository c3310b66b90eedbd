# /// script
# dependencies = ["semantic-kernel"]
# ///
"""Semantic Kernel: chat completion, and an agent with a plug-in."""

import asyncio
import gc

import openai
import steps
from pydantic import BaseModel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function
from steps import COUNTED, SHORT


class Person(BaseModel):
    name: str
    age: int


class Plugin:
    def __init__(self):
        self.asked = []

    @kernel_function(name="weather", description="How warm a city is.")
    def weather(self, city: str) -> str:
        self.asked.append(city)
        return '{"celsius": 20}'


def _service(model=steps.MODEL):
    client = openai.AsyncOpenAI(base_url=steps.URL, api_key="none", max_retries=0)
    return OpenAIChatCompletion(ai_model_id=model, async_client=client)


def _said(text):
    history = ChatHistory()
    history.add_user_message(text)
    return history


SETTINGS = OpenAIChatPromptExecutionSettings(temperature=0)


async def chat():
    assert str(await _service().get_chat_message_content(_said(SHORT), SETTINGS)) == COUNTED


async def stream():
    pieces = _service().get_streaming_chat_message_content(_said(SHORT), SETTINGS)
    assert "".join([str(piece) async for piece in pieces]) == COUNTED


async def tools():
    plugin = Plugin()
    agent = ChatCompletionAgent(service=_service(steps.SCRIPTED), name="a", plugins=[plugin])
    cities = ("Rome", "Oslo", "Lima")
    calls = [steps.calling("Plugin-weather", city=city) for city in cities]
    question = steps.reciting(*calls, steps.AFTER_THREE_ROUNDS)
    assert str(await agent.get_response(messages=question)) == steps.AFTER_THREE_ROUNDS
    assert plugin.asked == [*cities]


async def structured():
    settings = OpenAIChatPromptExecutionSettings(temperature=0, response_format=Person)
    made = await _service().get_chat_message_content(_said(steps.ABOUT_ANA), settings)
    assert Person.model_validate_json(str(made)) == Person(name="Ana", age=31)


async def abort():
    pieces = _service(steps.SCRIPTED).get_streaming_chat_message_content(_said(steps.ENDLESS), SETTINGS)
    await anext(pieces)
    steps.wait_until_running()
    await pieces.aclose()
    del pieces
    idle = asyncio.create_task(steps.idle())
    while not idle.done():
        gc.collect()  # until then the client keeps its connection
        await asyncio.sleep(0.5)
    await idle


async def error():
    with steps.refused(ServiceResponseException, by=steps.TOO_MANY_TOKENS):
        await _service().get_chat_message_content(_said(steps.TOO_LONG), SETTINGS)


resume = steps.lacks("asks anew")
steps.run(globals())
