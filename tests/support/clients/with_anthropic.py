# /// script
# dependencies = ["anthropic", "pydantic"]
# ///
"""Anthropic's own: messages, whole and streamed, and its runner of tools."""

import steps
from anthropic import Anthropic, BadRequestError, NotFoundError, beta_tool
from pydantic import BaseModel
from steps import COUNTED, MODEL, SHORT

client = Anthropic(base_url=steps.ROOT, api_key="none", max_retries=0)
asked = {"model": MODEL, "max_tokens": 100, "extra_body": {"temperature": 0}}
REFUSED = ("error", "tools")
"""The runner of tools asks for threads first, and goes on without."""
said = [{"role": "user", "content": SHORT}]


class Person(BaseModel):
    name: str
    age: int


@beta_tool(name="weather")
def _weather(city: str) -> str:
    """How warm a city is."""
    return '{"celsius": 20}'


def chat():
    whole = client.messages.create(messages=said, **asked)
    assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
    assert whole.content[0].text == COUNTED
    counted = client.messages.count_tokens(model=MODEL, messages=said)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def stream():
    with client.messages.stream(messages=said, **asked) as events:
        assert "".join(events.text_stream) == COUNTED
        final = events.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (COUNTED, "end_turn")


def tools():
    """Of `tool_runner`."""
    question = [{"role": "user", "content": "How warm is it in Rome?"}]
    *calling, last = client.beta.messages.tool_runner(messages=question, tools=[_weather], **asked)
    assert [block.input for one in calling for block in one.content] == [{"city": "Rome"}]
    assert "20 degrees" in last.content[0].text
    question = [{"role": "user", "content": steps.THREE_ROUNDS}]
    runner = client.beta.messages.tool_runner(
        model=steps.SCRIPTED, max_tokens=1000, messages=question, tools=[_weather], stream=True
    )
    *calling, last = (events.get_final_message() for events in runner)
    assert [one.stop_reason for one in calling] == ["tool_use"] * 3
    assert last.content[0].text == steps.AFTER_THREE_ROUNDS


def structured():
    about = [{"role": "user", "content": steps.ABOUT_ANA}]
    assert client.messages.parse(messages=about, output_format=Person, **asked).parsed_output == Person(
        name="Ana", age=31
    )


def abort():
    endless = [{"role": "user", "content": steps.ENDLESS}]
    with client.messages.stream(model=steps.SCRIPTED, max_tokens=30_000, messages=endless) as events:
        for _, _ in zip(range(5), events, strict=False):
            steps.wait_until_running()
    steps.wait_until_idle()


def error():
    for kind, by, wrong in (
        (NotFoundError, "model", {"model": "none"}),
        (BadRequestError, "max_tokens: ", {"max_tokens": 0}),
        (BadRequestError, steps.TOO_MANY_TOKENS, {"messages": [{"role": "user", "content": steps.TOO_LONG}]}),
    ):
        with steps.refused(kind, by=by):
            client.messages.create(**{"messages": said, **asked, **wrong})


resume = steps.lacks("asks anew")


def models():
    assert {MODEL, steps.SCRIPTED} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(MODEL).max_input_tokens


steps.run(globals())
