"""An agent with FastAPI: `uvicorn --app-dir examples fastapi_agent:app`, then

    curl -N 'http://127.0.0.1:8000/ask?question=How+warm+is+it+in+Rome?'

The model calls functions of this file until it has an answer. What it calls and what it says is told meanwhile, as
server-sent events. Its worker serves a model that knows tools, such as petiole-tiny-tools.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from petiole import SSE_HEADERS, chat

app = FastAPI()
MOST_TURNS = 8
CELSIUS = {"Rome": 20, "Oslo": -3}


def weather(city: str) -> dict[str, int | None]:
    return {"celsius": CELSIUS.get(city)}


def multiply(a: int, b: int) -> dict[str, int]:
    return {"product": a * b}


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FUNCTIONS = {"weather": weather, "multiply": multiply}
TOOLS = [
    tool("weather", city={"type": "string", "maxLength": 40}),
    tool("multiply", a={"type": "integer"}, b={"type": "integer"}),
]


async def steps(question: str) -> AsyncIterator[dict[str, Any]]:
    """What the agent does: its calls with their results, then its answer. A grammar holds the arguments to the
    schema of `tools`, so they need no check here."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        task = await chat.adelay(messages=messages, tools=TOOLS, max_tokens="rest", temperature=0)
        said = await task.aget(timeout=60)
        calls = said.get("tool_calls", [])
        called = [{"id": call["id"], "type": "function", "function": call} for call in calls]
        text = said.get("content", said["text"])
        messages.append({"role": "assistant", "content": text, "tool_calls": called})
        if not calls:
            yield {"answer": text}
            return
        for call in calls:
            arguments = json.loads(call["arguments"])
            result = FUNCTIONS[call["name"]](**arguments)
            yield {"called": call["name"], "with": arguments, "result": result}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
    yield {"error": f"no answer after {MOST_TURNS} turns"}


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    async def events() -> AsyncIterator[str]:
        async for step in steps(question):
            yield f"data: {json.dumps(step)}\n\n"

    return StreamingResponse(events(), headers=SSE_HEADERS)
