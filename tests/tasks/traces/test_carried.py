"""The headers of a trace: which are right, and to which trace a submission belongs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.traces import carried
from petiole.tasks.wire.headers import check_submission
from petiole.tasks.wire.keys import TRACEPARENT_HEADER, TRACESTATE_HEADER

PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"
WRONG: list[Any] = [
    *("", "00", PARENT.upper(), PARENT[:-1], f"{PARENT} ", f"01{PARENT[2:]}", 5, None, [PARENT]),
    *(f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01"),
]


def test_what_is_right_is_carried() -> None:
    state = {TRACESTATE_HEADER: "vendor=1"}
    assert carried.of({TRACEPARENT_HEADER: PARENT, **state, "tenant": "a"}) == {
        TRACEPARENT_HEADER: PARENT,
        **state,
    }
    assert carried.of({TRACEPARENT_HEADER: PARENT, TRACESTATE_HEADER: "\n"}) == {TRACEPARENT_HEADER: PARENT}
    assert carried.of(state) == {}, "without a span there is no trace"


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_what_is_wrong_is_left_out_of_a_message_and_refused_to_a_producer(wrong: Any) -> None:
    assert carried.of({TRACEPARENT_HEADER: wrong}) == {}
    if wrong is not None:
        with pytest.raises(InvalidRequest, match=r"headers\.traceparent: must be 00-TRACE-SPAN-FLAGS"):
            check_submission({"headers": {TRACEPARENT_HEADER: wrong}}, ["json"])


@given(
    st.binary(min_size=16, max_size=16).filter(any), st.binary(min_size=8, max_size=8).filter(any), st.booleans()
)
def test_a_span_is_carried_as_it_is(trace: bytes, span: bytes, sampled: bool) -> None:
    from opentelemetry.trace import SpanContext, TraceFlags, get_current_span

    from petiole.tasks.traces import spans

    context = SpanContext(int.from_bytes(trace), int.from_bytes(span), True, TraceFlags(sampled))
    found = spans.context_of(carried.of_context(context))
    assert found is not None
    assert get_current_span(found).get_span_context() == context


def test_a_submission_follows_what_runs() -> None:
    assert carried.headers() == {}
    with carried.following({TRACEPARENT_HEADER: PARENT}):
        assert carried.headers() == {TRACEPARENT_HEADER: PARENT}
        with carried.following({}):
            assert carried.headers() == {}
    assert carried.headers() == {}
