# /// script
# dependencies = ["openai", "pydantic"]
# ///
"""OpenAI's own: chat completions, completions and responses, whole and streamed."""

import json

import steps
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel
from steps import COUNTED, MODEL, SHORT

client = OpenAI(base_url=steps.URL, api_key="none", max_retries=0)
said = [{"role": "user", "content": SHORT}]
asked = {"model": MODEL, "temperature": 0}
PARAMETERS = {
    "weather": {"city": {"type": "string"}},
    "multiply": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
SCHEMAS = {
    name: {"type": "object", "properties": one, "required": [*one], "additionalProperties": False}
    for name, one in PARAMETERS.items()
}
ROUNDS = (("How warm is it in Rome?", "20"), ("What is 34 times 56?", "1904"), ("How warm is it in Oslo?", "20"))


class Person(BaseModel):
    name: str
    age: int


def _found(name: str, arguments: str) -> str:
    given = json.loads(arguments)
    return json.dumps({"celsius": 20} if name == "weather" else {"product": given["a"] * given["b"]})


def chat():
    assert client.chat.completions.create(messages=said, **asked).choices[0].message.content == COUNTED
    assert client.responses.create(input=SHORT, **asked).output_text == COUNTED
    text = client.completions.create(prompt=SHORT, max_tokens=4, logprobs=2, **asked)
    assert len(text.choices[0].logprobs.tokens) == 4


def stream():
    chunks = client.chat.completions.create(messages=said, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == COUNTED
    with client.chat.completions.stream(messages=said, **asked) as events:
        assert events.get_final_completion().choices[0].message.content == COUNTED
    with client.responses.stream(input=SHORT, **asked) as events:
        assert events.get_final_response().output_text == COUNTED


def tools():
    functions = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
    messages = []
    for question, answer in ROUNDS:
        messages.append({"role": "user", "content": question})
        made = client.chat.completions.create(messages=messages, tools=functions, **asked).choices[0].message
        [call] = made.tool_calls
        messages += [made, {"role": "tool", "tool_call_id": call.id, "content": _found(**dict(call.function))}]
        made = client.chat.completions.create(messages=messages, tools=functions, **asked).choices[0].message
        assert answer in made.content, made
        messages.append(made)
    functions = [{"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()]
    before = None
    for question, answer in ROUNDS:
        made = client.responses.create(input=question, previous_response_id=before, tools=functions, **asked)
        [call] = (item for item in made.output if item.type == "function_call")
        output = _found(call.name, call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        made = client.responses.create(input=[result], previous_response_id=made.id, tools=functions, **asked)
        assert answer in made.output_text, made
        before = made.id


def structured():
    about = [{"role": "user", "content": steps.ABOUT_ANA}]
    parsed = client.chat.completions.parse(messages=about, response_format=Person, **asked)
    assert parsed.choices[0].message.parsed == Person(name="Ana", age=31)
    parsed = client.responses.parse(input=steps.ABOUT_ANA, text_format=Person, **asked)
    assert parsed.output_parsed == Person(name="Ana", age=31)


def abort():
    endless = [{"role": "user", "content": steps.ENDLESS}]
    with client.chat.completions.create(model=steps.SCRIPTED, messages=endless, stream=True) as chunks:
        for _, _ in zip(range(5), chunks, strict=False):
            steps.wait_until_running()
    steps.wait_until_idle()
    begun = client.responses.create(model=steps.SCRIPTED, input=steps.ENDLESS, background=True)
    assert client.responses.cancel(begun.id).status == "cancelled"
    steps.wait_until_idle()


def error():
    for kind, by, wrong in (
        (NotFoundError, "model", {"model": "none"}),
        (BadRequestError, "max_tokens", {"max_tokens": 0}),
        (BadRequestError, steps.TOO_MANY_TOKENS, {"messages": [{"role": "user", "content": steps.TOO_LONG}]}),
    ):
        with steps.refused(kind, by=by):
            client.chat.completions.create(**{"messages": said, **asked, **wrong})


def resume():
    """At the event after the third."""
    with client.responses.create(input=SHORT, stream=True, background=True, **asked) as events:
        first = [next(events) for _ in range(3)]
    name = first[0].response.id
    with client.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number) as events:
        rest = [*events]
    whole = [*client.responses.retrieve(name, stream=True)]
    assert [event.sequence_number for event in (*first, *rest)] == [event.sequence_number for event in whole]
    assert rest[-1].response.output_text == COUNTED


def models():
    assert {MODEL, steps.SCRIPTED} <= {model.id for model in client.models.list()}


steps.run(globals())
