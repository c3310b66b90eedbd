"""Coordinates and sizes as kinds of values: the only place where their tokens, tables and cache tokens meet."""

from __future__ import annotations

from petiole.cache import CoordToken, SizeToken, ValueToken
from petiole.gpu_worker.request.values import Numbers, ValueKind, ValueKinds

COORDINATE, SIZE = "coordinate", "size"


def value_kinds(
    coordinate_id: int, size_id: int, coordinates: tuple[float, ...], sizes: tuple[float, ...]
) -> ValueKinds:
    """A coordinate has one number, a size two, its width and its height. The tables tell what a number stands
    for."""

    def coordinate(numbers: Numbers) -> tuple[float, ...]:
        return (coordinates[numbers[0]],)

    def size(numbers: Numbers) -> tuple[float, ...]:
        return sizes[numbers[0]], sizes[numbers[1]]

    def coordinate_token(numbers: Numbers) -> ValueToken:
        return CoordToken(coordinates[numbers[0]], numbers[0])

    def size_token(numbers: Numbers) -> ValueToken:
        return SizeToken(sizes[numbers[0]], sizes[numbers[1]], numbers[0], numbers[1])

    return ValueKinds(
        (
            ValueKind(COORDINATE, coordinate_id, 1, len(coordinates), coordinate, coordinate_token, CoordToken),
            ValueKind(SIZE, size_id, 2, len(sizes), size, size_token, SizeToken),
        )
    )
