"""Kinds of values: whose numbers stand where in a line, and what they become."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from petiole.cache import CoordToken, SizeToken
from petiole.gpu_worker.request.values import NO_NUMBER, Numbers, ValueKind, ValueKinds

TEXT = 1


def kind(token_id: int, n: int) -> ValueKind:
    def shown(numbers: Numbers) -> tuple[float, ...]:
        return tuple(one / 8 for one in numbers)

    def cached(numbers: Numbers) -> CoordToken:
        return CoordToken(0.0, sum(one * 8**k for k, one in enumerate(numbers)))

    return ValueKind(f"of {n}", token_id, n, 8, shown, cached, CoordToken if n == 1 else SizeToken)


def numbers(n: int) -> st.SearchStrategy[Numbers]:
    return st.tuples(*[st.integers(0, 7)] * n)


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_numbers_that_are_written_into_a_line_are_read_from_it(data: st.DataObject, widths: Sequence[int]) -> None:
    kinds = ValueKinds([kind(10 + k, n) for k, n in enumerate(widths)])
    line = [NO_NUMBER] * kinds.width
    expected = {10 + k: data.draw(numbers(n)) for k, n in enumerate(widths)}
    for token_id, of in expected.items():
        kinds.write(token_id, of, line)
    assert NO_NUMBER not in line, "each number has a column of its own"
    assert {token_id: kinds.numbers(token_id, line) for token_id in expected} == expected


def test_a_token_of_text_carries_nothing() -> None:
    kinds, line = ValueKinds([kind(5, 2)]), [3, 4]
    kinds.write(TEXT, (), line)
    assert (kinds.numbers(TEXT, line), kinds.shown(TEXT, ()), line) == ((), (), [3, 4])
    assert kinds.cache_token(TEXT, ()) == TEXT
    assert kinds.kind(TEXT) is None


def test_a_token_without_its_numbers_writes_none() -> None:
    kinds, line = ValueKinds([kind(5, 2)]), [NO_NUMBER] * 2
    kinds.write(5, (), line)
    assert line == [NO_NUMBER] * 2


@pytest.mark.parametrize(("token", "found"), [(CoordToken(0.5, 4), 5), (SizeToken(0.5, 0.5, 4, 4), 6)])
def test_a_typed_token_of_a_prompt_has_a_kind(token: CoordToken | SizeToken, found: int) -> None:
    kinds = ValueKinds([kind(5, 1), kind(6, 2)])
    of = kinds.kind_of(token)
    assert of is not None
    assert of.token_id == found
    assert ValueKinds([kind(7, 1)]).kind_of(SizeToken(0.5, 0.5, 4, 4)) is None
