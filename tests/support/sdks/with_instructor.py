"""instructor: a class is the answer's schema."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


openai = OpenAI(base_url=sys.argv[1], api_key="none")
client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
said = [{"role": "user", "content": "Extract name and age as JSON: Ana is 31."}]
person = client.chat.completions.create(
    model="petiole-tiny", messages=said, response_model=Person, max_tokens=100, temperature=0
)
assert isinstance(person, Person)
print("fine")
