# /// script
# dependencies = ["langchain-openai", "langchain"]
# ///
"""LangChain: a chat model over either interface, and an agent."""

import openai
import steps
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import COUNTED, SHORT


class Person(BaseModel):
    name: str
    age: int


@tool
def _weather(city: str) -> str:
    """How warm a city is."""
    return '{"celsius": 20}'


_weather.name = "weather"


def _models(model=steps.MODEL):
    common = {"base_url": steps.URL, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    return [ChatOpenAI(use_responses_api=responses, **common) for responses in (False, True)]


def chat():
    for model in _models():
        whole = model.invoke(SHORT)
        assert whole.text == COUNTED, whole
        assert whole.usage_metadata["output_tokens"] > 5, whole
        assert [one.text for one in model.batch([SHORT] * 3)] == [COUNTED] * 3


def stream():
    for model in _models():
        assert "".join(piece.text for piece in model.stream(SHORT)) == COUNTED


def tools():
    for model in _models(steps.SCRIPTED):
        agent = create_agent(model, [_weather])
        messages = agent.invoke({"messages": [{"role": "user", "content": steps.THREE_ROUNDS}]})["messages"]
        assert [one.type for one in messages] == ["human", *["ai", "tool"] * 3, "ai"]
        assert messages[-1].text == steps.AFTER_THREE_ROUNDS
    for model in _models():
        [call] = model.bind_tools([_weather], tool_choice="required").invoke("How warm is it in Rome?").tool_calls
        assert call["args"] == {"city": "Rome"}, call


def structured():
    for model in _models():
        person = model.with_structured_output(Person, method="json_schema").invoke(steps.ABOUT_ANA)
        assert person == Person(name="Ana", age=31)


def abort():
    for model in _models(steps.SCRIPTED):
        pieces = model.stream(steps.ENDLESS)
        next(pieces)
        steps.wait_until_running()
        pieces.close()
        steps.wait_until_idle()


def error():
    for model in _models():
        with steps.refused(openai.BadRequestError, by=steps.TOO_MANY_TOKENS):
            model.invoke(steps.TOO_LONG)


resume = steps.lacks("asks anew")
steps.run(globals())
