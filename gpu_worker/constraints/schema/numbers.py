"""Numbers within bounds, as terminals of a grammar.

One expression does the work: the magnitudes above a bound. The terminal of a range is "above the lower bound, and
not above the upper one". The grammar library intersects and complements expressions exactly. Its own expression
for ranges bars numbers that end before the digits of their bound do: 0.7 below 0.75.

Two forms are compared digit by digit, and cover what `json.dumps`, `repr` and a model write: plain (`1250`,
`0.050`), and scientific with one digit before the point (`1.25e+3`, `5e-2`). A number without bounds may have any
of JSON's forms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from petiole.gpu_worker.constraints.schema.nodes import Number

MAX_MULTIPLE_BOUND = 2**53
"""Bounds of multiples beyond this are refused: the grammar library keeps them as floats."""

_FRACTION = r"(\.[0-9]+)?"
_EXPONENT = "[eE]"
_EXPONENTS = "[+-]?([0-2]?[0-9]{1,2}|30[0-7])"
"""No further: such numbers are finite, and not zero, as floats."""
_COMPARED = rf"(0|[1-9][0-9]*){_FRACTION}|[1-9]{_FRACTION}{_EXPONENT}{_EXPONENTS}"
_ANY = rf"(0|[1-9][0-9]*){_FRACTION}({_EXPONENT}{_EXPONENTS})?"
_WHOLE = "0|[1-9][0-9]*"
_PLAIN_DIGITS = 25
"""A single number of more digits than this may also be written with an exponent."""


def normal(number: Number) -> Number | None:
    """The same numbers with the tightest bounds; None if there are none."""
    step = _step(number)
    low, high, low_open, high_open = number.low, number.high, number.low_open, number.high_open
    if step:
        if low is not None:
            least = math.ceil(low / step) * step
            low, low_open = least + step if low_open and least == low else least, False
        if high is not None:
            most = math.floor(high / step) * step
            high, high_open = most - step if high_open and most == high else most, False
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return None
    multiple = Fraction(0) if number.integer and step == 1 else step if number.multiple else number.multiple
    return Number(low, high, low_open, high_open, number.integer, multiple)


def terminal(number: Number) -> str:
    """The terminal of a normal number without a `multiple`."""
    low, high = number.low, number.high
    if low is None and high is None and not number.integer:
        return f"/-?({_ANY})/"
    if low is not None and low == high and (number.integer or sum(map(len, _digits(abs(low)))) <= _PLAIN_DIGITS):
        return _single(low, number.integer)
    parts = []
    if low is None or low < 0:
        bottom = -high if high is not None and high < 0 else Fraction(0)
        open_bottom = number.high_open and high is not None and high <= 0
        top = None if low is None else -low
        parts.append(f'"-" ({_between(bottom, open_bottom, top, number.low_open, number.integer)})')
    if high is None or high > 0 or (high == 0 and not number.high_open):
        bottom = low if low is not None and low > 0 else Fraction(0)
        open_bottom = number.low_open and low is not None and low >= 0
        parts.append(f"({_between(bottom, open_bottom, high, number.high_open, number.integer)})")
    return " | ".join(parts)


def multiples(number: Number) -> Iterator[dict[str, object] | str]:
    """The multiples of a normal number: schemas for the grammar library, which alone can count them, or terminals.

    The library writes a multiple of 0.25 with no decimals or with two, so there is one schema for each number of
    decimals. Bounds are open and one step away: the library's ranges are right for numbers with as many decimals
    as their bounds have.
    """
    for step in _steps(number.multiple):
        ends = normal(replace(number, multiple=step))
        if ends is None:
            continue
        low, high = ends.low, ends.high
        if low is not None and low == high:
            yield _single(low, number.integer)
            continue
        schema: dict[str, object] = {"type": "integer" if number.integer else "number", "multipleOf": _json(step)}
        if low is not None:
            schema |= {"exclusiveMinimum": _json(low - step)} if low else {"minimum": 0}
        if high is not None:
            schema |= {"exclusiveMaximum": _json(high + step)} if high else {"maximum": 0}
        yield schema


def _steps(step: Fraction) -> Iterator[Fraction]:
    """The least multiples of `step` that have one decimal, two, and so on, up to those that `step` has."""
    whole, decimals = _digits(step)
    coefficient, places = int(whole + decimals), len(decimals)
    if not places:
        yield step
    for n in range(1, places + 1):
        yield Fraction(coefficient // math.gcd(coefficient, 10 ** (places - n)), 10**n)


def _step(number: Number) -> Fraction:
    """The distance between neighbours; 0 if the numbers are dense."""
    step, unit = number.multiple, Fraction(int(number.integer))
    if not step or not unit:
        return step or unit
    return Fraction(
        math.lcm(step.numerator * unit.denominator, unit.numerator * step.denominator),
        step.denominator * unit.denominator,
    )


def _json(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)


def _single(number: Fraction, integer: bool) -> str:
    whole, fraction = _digits(abs(number))
    if integer:
        return f"/-?{whole}/" if number == 0 else f"/{'-' * (number < 0)}{whole}/"
    digits = rf"{whole}\.{fraction}0*" if fraction else rf"{whole}(\.0+)?"
    return f"/-?{digits}/" if number == 0 else f"/{'-' * (number < 0)}{digits}/"


def _between(low: Fraction, low_open: bool, high: Fraction | None, high_open: bool, integer: bool) -> str:
    """The magnitudes from `low` to `high`, as part of a terminal."""
    parts = [f"/{_WHOLE if integer else _COMPARED}/"]
    if integer:
        parts += [f"/{_whole_from(str(int(low)))}/"] if low else []
        parts += [] if high is None else [f"~/{_whole_from(str(int(high) + 1))}/"]
    else:
        parts += [f"/{_above(low, low_open)}/"] if low or low_open else []
        parts += [] if high is None else [f"~/{_above(high, not high_open)}/"]
    return " & ".join(parts)


def _above(bound: Fraction, strictly: bool) -> str:
    """All compared forms of the magnitudes above `bound`, and of `bound` itself unless `strictly`."""
    whole, fraction = _digits(bound)
    plain = [f"({part}){_FRACTION}" for part in _longer_or_greater(whole)]
    plain.append(whole + _fraction_from(fraction, strictly))
    if not bound:
        return "|".join([*plain, f"[1-9]{_FRACTION}{_EXPONENT}{_EXPONENTS}"])
    digits = whole + fraction
    exponent = len(whole) - 1 - (len(digits) - len(digits.lstrip("0")))
    first, rest = digits.strip("0")[0], digits.strip("0")[1:]
    greater = [f"[{int(first) + 1}-9]{_FRACTION}"] if first != "9" else []
    mantissa = "|".join([*greater, first + _fraction_from(rest, strictly)])
    return "|".join(
        [
            *plain,
            rf"[1-9]{_FRACTION}{_EXPONENT}({_exponent_from(exponent + 1)})",
            rf"({mantissa}){_EXPONENT}({_exponent_of(exponent)})",
        ]
    )


def _fraction_from(digits: str, strictly: bool) -> str:
    """The fractions above 0.`digits`, with their point; none at all counts as zero."""
    if not digits and not strictly:
        return _FRACTION
    parts = [f"{digits[:k]}[{int(digit) + 1}-9][0-9]*" for k, digit in enumerate(digits) if digit != "9"]
    parts.append(digits + ("[0-9]*[1-9][0-9]*" if strictly else "[0-9]*"))
    return rf"\.({'|'.join(parts)})"


def _whole_from(digits: str) -> str:
    """The whole numbers from `digits` up."""
    return "|".join([*_longer_or_greater(digits), digits])


def _longer_or_greater(digits: str) -> list[str]:
    longer = f"[1-9][0-9]{{{len(digits)},}}"
    return [longer] + [
        f"{digits[:k]}[{int(digit) + 1}-9][0-9]{{{len(digits) - k - 1}}}"
        for k, digit in enumerate(digits)
        if digit != "9"
    ]


def _exponent_from(least: int) -> str:
    """The exponents from `least` up, with zeros in front or without."""
    if least > 0:
        return rf"\+?0*({_whole_from(str(least))})"
    return rf"\+?[0-9]+|-0*({_whole_to(str(-least))})"


def _exponent_of(exponent: int) -> str:
    return r"[+-]?0+" if exponent == 0 else rf"\+?0*{exponent}" if exponent > 0 else f"-0*{-exponent}"


def _whole_to(digits: str) -> str:
    """The whole numbers up to `digits`."""
    shorter = [f"[1-9][0-9]{{0,{len(digits) - 2}}}"] if len(digits) > 1 else []
    smaller = [
        f"{digits[:k]}[{int(k == 0 and len(digits) > 1)}-{int(digit) - 1}][0-9]{{{len(digits) - k - 1}}}"
        for k, digit in enumerate(digits)
        if int(digit) > int(k == 0 and len(digits) > 1)
    ]
    return "|".join(["0", *shorter, *smaller, digits])


def _digits(number: Fraction) -> tuple[str, str]:
    """The digits before and after the point of a magnitude, without zeros that say nothing."""
    places = 0
    while number.denominator != 1:
        number *= 10
        places += 1
    digits = str(int(number)).rjust(places + 1, "0")
    return digits[: len(digits) - places], digits[len(digits) - places :]
