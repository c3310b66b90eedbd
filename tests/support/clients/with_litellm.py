# /// script
# dependencies = ["litellm"]
# ///
"""LiteLLM: chat and responses through its provider for vLLM, and its router."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import litellm
import steps
from pydantic import BaseModel
from steps import COUNTED, SHORT

where = {"api_base": steps.URL, "api_key": "none"}
asked = {"model": f"hosted_vllm/{steps.MODEL}", "temperature": 0, **where}
scripted = {"model": f"hosted_vllm/{steps.SCRIPTED}", **where}
said = [{"role": "user", "content": SHORT}]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
weather = {"type": "function", "function": {"name": "weather", "parameters": parameters}}


class Person(BaseModel):
    name: str
    age: int


def chat():
    assert litellm.completion(messages=said, **asked).choices[0].message.content == COUNTED
    answer = litellm.responses(input=SHORT, **{**asked, "model": f"openai/{steps.MODEL}"})
    assert answer.output[-1].content[0].text == COUNTED


def stream():
    pieces = litellm.completion(messages=said, stream=True, **asked)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == COUNTED


def tools():
    messages = [{"role": "user", "content": steps.THREE_ROUNDS}]
    for city in ("Rome", "Oslo", "Lima"):
        made = litellm.completion(messages=messages, tools=[weather], **scripted).choices[0].message
        [call] = made.tool_calls
        assert json.loads(call.function.arguments) == {"city": city}
        messages += [made, {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 20}'}]
    made = litellm.completion(messages=messages, tools=[weather], **scripted).choices[0].message
    assert made.content == steps.AFTER_THREE_ROUNDS


def structured():
    about = [{"role": "user", "content": steps.ABOUT_ANA}]
    made = litellm.completion(messages=about, response_format=Person, **asked).choices[0].message.content
    assert Person.model_validate_json(made) == Person(name="Ana", age=31)


async def abort():
    messages = [{"role": "user", "content": steps.ENDLESS}]
    pieces = await litellm.acompletion(messages=messages, stream=True, **scripted)
    await anext(aiter(pieces))
    steps.wait_until_running()
    await pieces.aclose()
    await steps.idle()


def error():
    with steps.refused(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": steps.TOO_LONG}], **asked)
    with steps.refused(litellm.NotFoundError):
        litellm.completion(messages=said, **{**asked, "model": "hosted_vllm/none"})

    # A router goes on to a model with a longer context.
    models = [{"model_name": name, "litellm_params": one} for name, one in (("short", asked), ("long", scripted))]
    router = litellm.Router(models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
    question = steps.TOO_LONG + steps.reciting("I have read it all.")
    made = router.completion("short", messages=[{"role": "user", "content": question}])
    assert made.choices[0].message.content == "I have read it all."


resume = steps.lacks("asks anew")
steps.run(globals())
