"""langchain-openai: a tool is called, whole and streamed, and its answer goes back, over either interface."""

import sys
from functools import reduce
from operator import add
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """How warm a city is."""
    return f"20 degrees in {city}"


asked = HumanMessage("How is the weather in Rome?")
for over_responses in (False, True):
    model = ChatOpenAI(
        base_url=sys.argv[1],
        api_key="none",
        model="tooled",
        temperature=0,
        max_tokens=100,
        use_responses_api=over_responses,
    )
    calling = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    called = calling.invoke([asked])
    [call] = called.tool_calls
    assert call["name"] == "weather", call
    assert call["args"]["city"] in ("Paris", "Rome"), call
    streamed = reduce(add, calling.stream([asked]))
    [again] = streamed.tool_calls
    assert (again["name"], again["args"]) == (call["name"], call["args"])
    answered = weather.invoke(call)
    assert isinstance(answered, ToolMessage), answered
    last = model.bind_tools([weather], tool_choice="none").invoke([asked, called, answered])
    assert last.text, last
    assert not last.tool_calls
print("fine")
