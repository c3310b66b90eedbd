"""langchain-openai: invoked, streamed, in a batch, with a schema, over either interface."""

import sys

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


ASKED = "Count from 1 to 5."
for over_responses in (False, True):
    model = ChatOpenAI(
        base_url=sys.argv[1],
        api_key="none",
        model="petiole-tiny",
        temperature=0,
        use_responses_api=over_responses,
        stream_usage=not over_responses,
    )
    whole = model.invoke(ASKED)
    assert "1, 2, 3" in whole.text, whole
    assert whole.usage_metadata["output_tokens"] > 5, whole
    assert "".join(piece.text for piece in model.stream(ASKED)) == whole.text
    assert [one.text for one in model.batch([ASKED] * 3)] == [whole.text] * 3
    person = model.with_structured_output(Person, method="json_schema")
    assert isinstance(person.invoke("Extract name and age as JSON: Ana is 31."), Person)
print("fine")
