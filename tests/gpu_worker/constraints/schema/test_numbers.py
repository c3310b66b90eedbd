"""Ranges of numbers against decimal arithmetic: exactly the numbers of the range, in every form a model writes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from petiole.gpu_worker.exceptions import InvalidRequest
from tests.gpu_worker.constraints.schemas import bound
from tests.gpu_worker.constraints.walking import ConstraintState, accepts, compiled, draw

EXACT = Context(prec=700)


def exact(number: float) -> Fraction:
    return Fraction(Decimal(repr(number)))


def holds(schema: dict[str, Any], number: Fraction) -> bool:
    tests = {
        "minimum": lambda limit: number >= limit,
        "exclusiveMinimum": lambda limit: number > limit,
        "maximum": lambda limit: number <= limit,
        "exclusiveMaximum": lambda limit: number < limit,
        "multipleOf": lambda limit: number % limit == 0,
    }
    whole = schema["type"] == "number" or number.denominator == 1
    return whole and all(test(exact(schema[key])) for key, test in tests.items() if key in schema)


def forms(number: Fraction, kind: str) -> Iterator[str]:
    """How people, `json.dumps` and `repr` write a decimal."""
    decimal = EXACT.divide(Decimal(number.numerator), Decimal(number.denominator))
    if number.denominator == 1:
        yield str(int(number))
    if kind == "number":
        plain = format(decimal, "f")
        yield from (plain, plain + ("0" if "." in plain else ".0"), json.dumps(float(number)))
    if kind == "number" and number:
        mantissa, exponent = format(decimal, "e").split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        yield from (f"{mantissa}e{exponent}", f"{mantissa}E{int(exponent)}", f"{mantissa}e{int(exponent):+03d}")


def near(schema: dict[str, Any], rng: random.Random) -> Iterator[Fraction]:
    """Numbers around the bounds, the beginnings of the bounds' digits, and others."""
    for limit in (exact(value) for key, value in schema.items() if "imum" in key):
        yield from (limit + k * Fraction(10) ** e for k in (-3, -1, 0, 1, 3) for e in (-6, -2, 0, 3))
        yield from (-limit, limit * 10, limit / 10)
        digits = format(EXACT.divide(Decimal(limit.numerator), Decimal(limit.denominator)), "f")
        yield from (Fraction(digits[:n]) for n in range(1, len(digits) + 1) if digits[n - 1] not in "-.")
    yield from (exact(bound(rng)) for _ in range(5))
    yield Fraction(0)


ranges = st.builds(
    lambda seed, low, high, kind: random_range(random.Random(seed), low, high, kind),
    st.integers(0, 10**9),
    st.sampled_from([None, "minimum", "exclusiveMinimum"]),
    st.sampled_from([None, "maximum", "exclusiveMaximum"]),
    st.sampled_from(["number", "integer"]),
)


def random_range(rng: random.Random, low: str | None, high: str | None, kind: str) -> dict[str, Any]:
    bounds = sorted([bound(rng), bound(rng)])
    return {"type": kind} | {key: value for key, value in zip((low, high), bounds, strict=True) if key}


def state_of(schema: dict[str, Any]) -> ConstraintState:
    """The constraint of a range that has a number."""
    refusal = None
    try:
        return compiled("json_schema", schema)
    except InvalidRequest as error:
        refusal = error.limit
    assert refusal == "must allow a value"
    assert not any(holds(schema, number) for number in near(schema, random.Random(0)))
    raise UnsatisfiedAssumption


@settings(max_examples=150, deadline=None)
@given(ranges, st.integers(0, 999))
@pytest.mark.slow
def test_exactly_the_numbers_of_a_range_are_allowed(schema: dict[str, Any], seed: int) -> None:
    state = state_of(schema)
    for number in near(schema, random.Random(seed)):
        for text in forms(number, schema["type"]):
            if number or not text.startswith("-"):
                assert accepts(state, text) == holds(schema, Fraction(Decimal(text))), text


@settings(max_examples=150, deadline=None)
@given(ranges, st.integers(0, 999))
def test_a_random_walk_ends_in_a_number_of_the_range(schema: dict[str, Any], seed: int) -> None:
    text = draw(state_of(schema), random.Random(seed))
    assert holds(schema, Fraction(Decimal(text)))
    assert json.loads(text) not in (float("inf"), float("-inf"))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["number", "integer"]),
    st.sampled_from([2, 5, 0.25, 0.05, 0.5, 7]),
    st.integers(-400, 400),
    st.integers(0, 400),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.integers(0, 999),
)
def test_multiples_within_bounds(
    kind: str, step: float, low: int, size: int, lower: str, upper: str, seed: int
) -> None:
    schema = {"type": kind, "multipleOf": step, lower: low / 20, upper: (low + size) / 20}
    state = state_of(schema)
    for k in range(low - 20, low + size + 20, 5):
        number = Fraction(k, 20)
        assert accepts(state, text := f"{float(number):g}") == holds(schema, number), text
    assert holds(schema, Fraction(draw(state, random.Random(seed))))


@pytest.mark.parametrize(
    ("schema", "texts", "barred"),
    [
        ({"minimum": 0, "maximum": 0.75}, ["0.7", "0.75", "0.750", "0", "7e-1"], ["0.76", "0.751", "1"]),
        ({"minimum": 1.4, "maximum": 1.49}, ["1.4", "1.40", "1.41", "1.49"], ["1.39", "1.5", "1", "2"]),
        ({"minimum": -1e20, "maximum": 1e20}, ["100000000000000000000", "1e20", "-1e+20", "5"], ["1.1e20"]),
        ({"exclusiveMinimum": 0, "maximum": 1}, ["1e-05", "1", "1.0"], ["0", "0.0", "-1"]),
        ({"const": 0.5}, ["0.5", "0.50"], ["0.51", "5"]),
        ({}, ["-12.5e3", "0", "1E+5"], ["01", "+1", ".5", "1."]),
        ({"maximum": 0.5, "multipleOf": 0.01}, ["0.5", "0.50", "0.05", "-3"], ["0.51", "0.505"]),
    ],
)
def test_ranges_that_people_ask_for(schema: dict[str, Any], texts: list[str], barred: list[str]) -> None:
    state = compiled("json_schema", {"type": "number", **schema})
    assert [text for text in texts if not accepts(state, text)] == []
    assert [text for text in barred if accepts(state, text)] == []


def test_bounds_of_multiples_are_limited() -> None:
    with pytest.raises(InvalidRequest, match=r"must have bounds of at most 9007199254740992 beside multipleOf"):
        compiled("json_schema", {"type": "integer", "multipleOf": 5, "maximum": 1e20})
