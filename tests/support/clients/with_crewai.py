# /// script
# dependencies = ["crewai"]
# ///
"""CrewAI: a model, and a crew of one agent."""

import os

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

import steps
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from crewai.utilities.exceptions.context_window_exceeding_exception import LLMContextLengthExceededError
from pydantic import BaseModel
from steps import COUNTED, SHORT


class Person(BaseModel):
    name: str
    age: int


asked = []


@tool
def weather(city: str) -> str:
    """How warm a city is."""
    asked.append(city)
    return '{"celsius": 20}'


def _model(model=steps.MODEL, **more):
    return LLM(model=f"openai/{model}", base_url=steps.URL, api_key="none", temperature=0, max_retries=0, **more)


def _crew(question, **more):
    agent = Agent(
        role="r", goal="g", backstory="b", llm=_model(steps.SCRIPTED, **more), tools=[weather], verbose=False
    )
    task = Task(description=question, expected_output="a sentence", agent=agent)
    return Crew(agents=[agent], tasks=[task], verbose=False, tracing=False)


def chat():
    assert _model().call(SHORT) == COUNTED


def stream():
    from crewai.events import LLMStreamChunkEvent, crewai_event_bus

    pieces = []
    with crewai_event_bus.scoped_handlers():
        crewai_event_bus.on(LLMStreamChunkEvent)(lambda _, event: pieces.append(event.chunk))
        assert _model(stream=True).call(SHORT) == COUNTED
        crewai_event_bus.flush()
    assert "".join(pieces) == COUNTED, pieces


def tools():
    for streamed in (False, True):
        asked.clear()
        assert _crew(steps.THREE_ROUNDS, stream=streamed).kickoff().raw == steps.AFTER_THREE_ROUNDS
        assert asked == ["Rome", "Oslo", "Lima"], asked


def structured():
    made = _model(response_format=Person).call(steps.ABOUT_ANA)
    assert made == Person(name="Ana", age=31), made


abort = steps.lacks("no call")


def error():
    with steps.refused(LLMContextLengthExceededError):
        _model().call(steps.TOO_LONG)


resume = steps.lacks("asks anew")
steps.run(globals())
