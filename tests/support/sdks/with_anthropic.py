"""Anthropic's own: messages, whole and streamed, counted; a schema as a class; errors; models."""

import sys

from anthropic import Anthropic, APIStatusError, BadRequestError, NotFoundError
from pydantic import BaseModel

MODEL, ASKED = "petiole-tiny", [{"role": "user", "content": "Count from 1 to 5."}]


class Person(BaseModel):
    name: str
    age: int


client = Anthropic(base_url=sys.argv[1].removesuffix("/v1"), api_key="none", max_retries=0)
asked = {"model": MODEL, "max_tokens": 100, "messages": ASKED, "extra_body": {"temperature": 0}}

whole = client.messages.create(**asked)
assert (whole.type, whole.role, whole.stop_reason) == ("message", "assistant", "end_turn")
assert "1, 2, 3" in whole.content[0].text
with client.messages.stream(**asked) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, whole.stop_reason)
assert final.usage.output_tokens == whole.usage.output_tokens
used = whole.usage
counted = client.messages.count_tokens(model=MODEL, messages=ASKED)
assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens

about = [{"role": "user", "content": "Extract name and age as JSON: Ana is 31."}]
parsed = client.messages.parse(**{**asked, "messages": about}, output_format=Person)
assert isinstance(parsed.parsed_output, Person)


def refused(**wrong):
    """The error of a request that is wrong in this."""
    try:
        client.messages.create(**{**asked, **wrong})
    except APIStatusError as error:
        return error
    raise AssertionError(wrong)


unknown, short = refused(model="none"), refused(max_tokens=0)
assert isinstance(unknown, NotFoundError)
assert unknown.request_id
assert isinstance(short, BadRequestError)
assert short.body["error"]["message"].startswith("max_tokens: ")

assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(MODEL).max_input_tokens
print("fine")
