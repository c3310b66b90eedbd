"""A gateway reads the same as every other reader."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from petiole.contract.results.outputs import Prepared
from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import delta_of
from petiole.gpu_worker.request import Delta
from petiole.tasks.wire.record import codec
from tests.tasks.wire.record.test_codec import UNKNOWN, counts, ends, outputs, texts

ERRORS = st.none() | st.just({"type": "E", "message": "m", "args": [1]})


def as_json(end: dict[str, Any]) -> Any:
    return json.loads(json.dumps(end, default=dataclasses.asdict))


END = st.builds(lambda end, error: as_json({**end, "error": error}), ends, ERRORS)


def assert_same(raw: bytes) -> None:
    ours, theirs = delta_of(raw), StreamDelta.model_validate_json(raw)
    for name in (*StreamDelta.model_fields, "end", "is_heartbeat"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    cut = [codec.without(delta, 1, 1) for delta in (ours, theirs)]
    assert all(getattr(cut[0], name) == getattr(cut[1], name) for name in StreamDelta.model_fields)


@settings(max_examples=50)
@given(outputs(), st.none() | END, UNKNOWN, st.booleans())
def test_a_delta_has_the_same_fields(
    pieces: list[Delta], end: dict[str, object] | None, unknown: dict[str, object], after: bool
) -> None:
    text = codec.merged(codec.opening("t", 1), pieces[0].index, pieces, end, after_prompt=after)
    assert_same(json.dumps({**json.loads(text), **unknown}).encode())


@given(st.builds(Prepared, texts, texts, counts, texts, st.none() | st.just({"f": {"x": "integer|null"}}),
                 st.none() | st.just({"on": True}), st.none() | texts | st.just({"a": [1]})))  # fmt: skip
def test_what_announces_a_task_too(prepared: Prepared) -> None:
    assert_same(codec.announced(codec.opening("t", 2), prepared).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"task_id": 3}', b'{"task_id":"t","attempt":1}'])
def test_what_is_no_delta_is_refused_in_the_same_way(raw: bytes) -> None:
    for read in (delta_of, StreamDelta.model_validate_json):
        with pytest.raises(ValidationError):
            read(raw)
