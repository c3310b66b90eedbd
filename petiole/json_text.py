"""JSON text of others as values. Called by the gateway.

msgspec reads 1e308 and its like by a way of 10 us: 3 MB of them held the interpreter for 5 s. So Python reads
what has a fraction or an exponent, and lets other threads go on meanwhile. The time for an integer grows with the
square of its digits, and its thread holds the interpreter: a process of its own calls `bound_integers`."""

from __future__ import annotations

import math
import sys

import msgspec

MOST_DIGITS = 640
"""The longest integer. Python knows no smaller limit."""


def number(text: str) -> float:
    """Raises ValueError for one that is too large."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"must be a number below 1e309, got {text[:40]}")
    return value


decode = msgspec.json.Decoder(float_hook=number).decode
"""Raises `msgspec.DecodeError`, `UnicodeDecodeError` or `RecursionError`."""


def bound_integers() -> None:
    """Refuse integers of more than `MOST_DIGITS`, in all of this process."""
    sys.set_int_max_str_digits(MOST_DIGITS)
