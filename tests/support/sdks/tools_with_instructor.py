"""instructor: a class is a tool that must be called; whole, and streamed part by part."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    warm: bool


client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none"), mode=instructor.Mode.TOOLS)
asked = {
    "model": "tooled",
    "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
    "max_tokens": 100,
    "temperature": 0,
}
weather = client.chat.completions.create(response_model=Weather, **asked)
assert isinstance(weather, Weather)
*_, last = client.chat.completions.create_partial(response_model=Weather, **asked)
assert last.city in ("Paris", "Rome"), last
assert (
    last.warm is not None
)  # of a part all fields may be missing, so the schema is another, and so may the answer be
print("fine")
