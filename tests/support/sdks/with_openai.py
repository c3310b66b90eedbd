"""OpenAI's own: chat, completions and responses, whole and streamed; a schema as a class."""

import sys

from openai import OpenAI
from pydantic import BaseModel

MODEL, ASKED = "petiole-tiny", "Count from 1 to 5."


class Person(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=sys.argv[1], api_key="none")
said = [{"role": "user", "content": ASKED}]

whole = client.chat.completions.create(model=MODEL, messages=said, temperature=0)
assert "1, 2, 3" in whole.choices[0].message.content
chunks = client.chat.completions.create(model=MODEL, messages=said, temperature=0, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content

about = [{"role": "user", "content": "Extract name and age as JSON: Ana is 31."}]
parsed = client.chat.completions.parse(model=MODEL, messages=about, temperature=0, response_format=Person)
assert isinstance(parsed.choices[0].message.parsed, Person)

with client.chat.completions.stream(model=MODEL, messages=said, temperature=0) as events:
    assert events.get_final_completion().choices[0].message.content == whole.choices[0].message.content

text = client.completions.create(model=MODEL, prompt=ASKED, max_tokens=4, temperature=0, logprobs=2, echo=False)
assert len(text.choices[0].logprobs.tokens) == 4

response = client.responses.create(model=MODEL, input=ASKED, temperature=0)
assert "1, 2, 3" in response.output_text
with client.responses.stream(model=MODEL, input=ASKED, temperature=0) as events:
    assert events.get_final_response().output_text == response.output_text
again = client.responses.create(model=MODEL, input="Again.", previous_response_id=response.id, temperature=0)
assert again.previous_response_id == response.id
structured = client.responses.parse(model=MODEL, input=about[0]["content"], temperature=0, text_format=Person)
assert isinstance(structured.output_parsed, Person)

assert MODEL in [model.id for model in client.models.list()]
print("fine")
