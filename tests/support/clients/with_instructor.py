# /// script
# dependencies = ["instructor"]
# ///
"""instructor: a class is the answer's schema, or a tool that must be called."""

import instructor
import steps
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS)
asked = {"model": steps.MODEL, "messages": [{"role": "user", "content": steps.ABOUT_ANA}], "temperature": 0}


class Person(BaseModel):
    name: str
    age: int


def _client(mode):
    return instructor.from_openai(OpenAI(base_url=steps.URL, api_key="none", max_retries=0), mode=mode)


chat = steps.lacks("structured alone")


def stream():
    for mode in MODES:
        *some, last = _client(mode).chat.completions.create_partial(response_model=Person, **asked)
        assert some
        assert isinstance(last.age, int), last


tools = steps.lacks("one tool")


def structured():
    for mode in MODES:
        assert isinstance(_client(mode).chat.completions.create(response_model=Person, **asked), Person)


abort = steps.lacks("no call")


def error():
    long = {**asked, "messages": [{"role": "user", "content": steps.TOO_LONG}]}
    for mode in MODES:
        with steps.refused(InstructorRetryException, by=steps.TOO_MANY_TOKENS):
            _client(mode).chat.completions.create(response_model=Person, max_retries=1, **long)


resume = steps.lacks("asks anew")
steps.run(globals())
