# /// script
# dependencies = ["smolagents[openai]"]
# ///
"""smolagents: an agent that calls tools, and one that writes code."""

import gc
import json

import openai
import steps
from smolagents import ChatMessage, CodeAgent, OpenAIModel, ToolCallingAgent, tool
from steps import ABOUT_ANA, COUNTED, SHORT


def _model(model=steps.MODEL):
    more = {"client_kwargs": {"max_retries": 0}, "retry": False} if model == steps.MODEL else {}
    return OpenAIModel(model, api_base=steps.URL, api_key="none", temperature=0, **more)


def _said(text):
    return [ChatMessage(role="user", content=text)]


@tool
def weather(city: str) -> str:
    """How warm a city is.

    Args:
        city: its name
    """
    return '{"celsius": 20}'


def chat():
    assert _model().generate(_said(SHORT)).content == COUNTED


def stream():
    assert "".join(piece.content or "" for piece in _model().generate_stream(_said(SHORT))) == COUNTED


def tools():
    calls = [steps.calling("weather", city=city) for city in ("Rome", "Oslo", "Lima")]
    last = steps.calling("final_answer", answer=steps.AFTER_THREE_ROUNDS)
    agent = ToolCallingAgent([weather], _model(steps.SCRIPTED), verbosity_level=0)
    assert agent.run(steps.reciting(*calls, last)) == steps.AFTER_THREE_ROUNDS
    assert [len(step.tool_calls) for step in agent.memory.steps[1:]] == [1] * 4
    code = [f"Thought: I ask.\n<code>\nprint(weather('{city}'))\n</code>" for city in ("Rome", "Oslo", "Lima")]
    agent = CodeAgent([weather], _model(steps.SCRIPTED), verbosity_level=0)
    assert agent.run(steps.reciting(*code, "<code>\nfinal_answer(2 * 10)\n</code>")) == 20


def structured():
    parameters = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": parameters, "required": ["name", "age"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    made = _model().generate(_said(ABOUT_ANA), response_format=wanted).content
    assert json.loads(made) == {"name": "Ana", "age": 31}


def abort():
    pieces = _model(steps.SCRIPTED).generate_stream(_said(steps.ENDLESS))
    next(pieces)
    steps.wait_until_running()
    pieces.close()
    del pieces
    gc.collect()  # until then the client keeps its connection
    steps.wait_until_idle()


def error():
    with steps.refused(openai.BadRequestError, by=steps.TOO_MANY_TOKENS):
        _model().generate(_said(steps.TOO_LONG))


resume = steps.lacks("asks anew")
steps.run(globals())
