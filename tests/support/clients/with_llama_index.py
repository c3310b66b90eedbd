# /// script
# dependencies = ["llama-index-llms-openai-like"]
# ///
"""LlamaIndex: completed, chatted, and an agent."""

import httpx
import openai
import steps
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import COUNTED, SHORT


class Person(BaseModel):
    name: str
    age: int


def _model(model=steps.MODEL, **more):
    common = {"api_base": steps.URL, "api_key": "none", "temperature": 0, "max_retries": 0}
    return OpenAILike(model=model, **{**common, "is_chat_model": True, "is_function_calling_model": True, **more})


said = [ChatMessage(role="user", content=SHORT)]


def chat():
    assert _model().chat(said).message.content == COUNTED
    assert _model(is_chat_model=False, max_tokens=10).complete(SHORT).text


def stream():
    assert "".join(piece.delta for piece in _model().stream_chat(said)) == COUNTED


async def tools():
    def weather(city: str) -> str:
        """How warm a city is."""
        return '{"celsius": 20}'

    agent = FunctionAgent(tools=[weather], llm=_model(steps.SCRIPTED, context_window=60_000))
    running = agent.run(user_msg=steps.THREE_ROUNDS)
    called = [event.tool_kwargs async for event in running.stream_events() if isinstance(event, ToolCallResult)]
    assert [one["city"] for one in called] == ["Rome", "Oslo", "Lima"], called
    assert str(await running) == steps.AFTER_THREE_ROUNDS


def structured():
    model = _model(should_use_structured_outputs=True)
    assert model.structured_predict(Person, PromptTemplate(steps.ABOUT_ANA)) == Person(name="Ana", age=31)


def abort():
    with httpx.Client() as connections:
        model = _model(steps.SCRIPTED, max_tokens=20_000, http_client=connections)
        next(model.stream_chat([ChatMessage(content=steps.ENDLESS)]))
        steps.wait_until_running()
    steps.wait_until_idle()


def error():
    with steps.refused(openai.BadRequestError, by=steps.TOO_MANY_TOKENS):
        _model().chat([ChatMessage(content=steps.TOO_LONG)])


resume = steps.lacks("asks anew")
steps.run(globals())
