"""Large answers are those of the usual encoder, made entry by entry and on a thread."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import threading
from typing import Any

from petiole.gateway.core.record import RequestRecord
from petiole.gateway.pooling.interfaces import Embeddings, PoolingResult
from petiole.gateway.serving.answering import large_answer, piecewise

VECTORS = [base64.b64encode(struct.pack("<2f", k, -0.5)).decode() for k in range(3)]
RECORD = RequestRecord(id="x-1", kind="embed", created=1, model="m", tasks=["t"])


def test_entries_of_an_iterator_are_encoded_one_by_one() -> None:
    plain: dict[str, Any] = {"a": [1, {"b": None}], "é": "x", "c": {"d": 1.5}}
    assert json.loads(piecewise({**plain, "of": iter(plain["a"])})) == {**plain, "of": plain["a"]}
    assert json.loads(piecewise({"none": iter(())})) == {"none": []}
    assert piecewise({}) == b"{}"


def test_vectors_are_numbers_or_base64() -> None:
    for form, shown in (("float", [[0.0, -0.5], [1.0, -0.5], [2.0, -0.5]]), ("base64", VECTORS)):
        asked = Embeddings(model="m", input="x", encoding_format=form)  # type: ignore[arg-type]
        answer = json.loads(piecewise(asked.answer(RECORD, PoolingResult(vectors=VECTORS, prompt_tokens=7))))
        assert [one["embedding"] for one in answer["data"]] == shown
        assert [one["index"] for one in answer["data"]] == [0, 1, 2]
        assert answer["usage"]["prompt_tokens"] == 7


def test_a_large_answer_is_made_on_a_thread_of_its_own() -> None:
    made_on: list[str] = []

    def build() -> dict[str, Any]:
        made_on.append(threading.current_thread().name)
        return {"a": 1}

    answer = asyncio.run(large_answer(build))
    assert (answer.status_code, bytes(answer.body)) == (200, b'{"a":1}')
    assert made_on[0].startswith("petiole-answers")
