"""Rows in an order in which they cost less: `prefix`, so that rows which begin alike follow each other and find
their beginning in the cache, or `length`, the longest first, so that no long one is the last.

An external merge sort: the rows go to files of this process, sorted runs of `RUN_BYTES`, which are merged as they
are read. So memory is bounded whatever the input is, and the order follows from the rows alone: the same batch,
begun again, reads the same order. Its files are temporary, and take twice the room of the input."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Literal, get_args

from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.rows.sources import Row

Sort = Literal["prefix", "length"]
SORTS: tuple[Sort, ...] = get_args(Sort)
RUN_BYTES = 16 * 2**20
MOST_RUNS = 32
_A_ROW = 200
"""Bytes of memory that a row takes beside its content."""

Key = tuple[Any, int]


class Stopped(Exception):  # noqa: N818
    """The batch was stopped while its rows were sorted."""


def in_order(
    rows: Iterable[Row], sort: Sort, beginning: Callable[[Row], str], stopped: Callable[[], bool]
) -> Iterator[Row]:
    """The rows, sorted; equal ones as they came. `beginning`: see `RowType.beginning`. Raises `Stopped`, and
    `StorageError` if there is no room for the files."""
    with contextlib.ExitStack() as stack:
        levels: list[list[IO[bytes]]] = [[]]  # of files that are runs of one, of MOST_RUNS, of its square, ...
        run: list[tuple[Key, Row]] = []
        size = 0
        for row in rows:
            if stopped():
                raise Stopped
            text = beginning(row)
            run.append(((text if sort == "prefix" else -len(text), row.number), row))
            size += row.size + _A_ROW + (len(text) if sort == "prefix" else 0)
            if size >= RUN_BYTES:
                levels[0].append(_written(stack, sorted(run, key=_key)))
                run, size = [], 0
                _merge_full(stack, levels)
        run.sort(key=_key)
        for _, row in heapq.merge(*map(_read, itertools.chain(*levels)), run, key=_key):
            yield row


def _key(one: tuple[Key, Row]) -> Key:
    return one[0]


def _merge_full(stack: contextlib.ExitStack, levels: list[list[IO[bytes]]]) -> None:
    """Merge each level that is full into a file of the next one: a row is written once a level."""
    level = 0
    while len(levels[level]) == MOST_RUNS:
        if level + 1 == len(levels):
            levels.append([])
        levels[level + 1].append(_written(stack, _merged(levels[level])))
        levels[level] = []
        level += 1


def _merged(runs: Iterable[IO[bytes]]) -> Iterator[tuple[Key, Row]]:
    return heapq.merge(*map(_read, runs), key=_key)


def _written(stack: contextlib.ExitStack, run: Iterable[tuple[Key, Row]]) -> IO[bytes]:
    with storage.named(tempfile.gettempdir()):
        file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stack, or at its end
        stack.enter_context(file)
        for key, row in run:
            pickle.dump((key, tuple(row)), file, pickle.HIGHEST_PROTOCOL)
        file.seek(0)
    return file


def _read(file: IO[bytes]) -> Iterator[tuple[Key, Row]]:
    with contextlib.suppress(EOFError):
        while True:
            key, row = pickle.load(file)
            yield key, Row(*row)
    file.close()
