"""What four-bit codes stand for: tables of 16 numbers."""

from __future__ import annotations

SIGNED = tuple(float(value) for value in range(-8, 8))
UNSIGNED = tuple(float(value) for value in range(16))
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
"""Integers whose zero is 8, integers with zeros beside them, and floats with two bits of exponent and one of
mantissa."""
