"""A fault at any call that an allocation makes, in order: nothing has changed, or it can be undone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import numpy as np
import pytest

from petiole.cache import KVAllocation, KVCacheManager
from petiole.cache.exceptions import ConservationError
from petiole.cache.groups.manager import build_manager
from petiole.cache.groups.table import WindowPages
from petiole.cache.prefix.factory import CacheKind
from tests.support import trials
from tests.support.interrupted import InjectedFaultError, Interrupted

KINDS: dict[str, tuple[CacheKind, dict[str, Any]]] = {
    "radix": ("radix", {}),
    "radix of few pages": ("radix", {"max_cached_pages": 64}),
    "blocks of one": ("block", {}),
    "blocks": ("block", {"page_size": 16}),
    "blocks of few pages": ("block", {"page_size": 16, "max_cached_pages": 5}),
    "windows": ("radix", {"windows": (WindowPages(8, 200),), "longest_step": 64}),
    "windows, blocks": ("block", {"page_size": 16, "windows": (WindowPages(32, 40),), "longest_step": 64}),
    "states": ("radix", {"snapshots": 8, "longest_step": 64}),
    "states, blocks": ("block", {"page_size": 16, "snapshots": 8, "longest_step": 64}),
    "no cache": ("off", {"page_size": 4}),
}
LONG, HALF = 96, 48
EVERY = 7 if trials.short else 1
"""Of the lines of a change, each so-many-th is the one that raises."""
CHANGES: dict[str, Callable[[KVCacheManager, KVAllocation], object]] = {
    "start": lambda manager, mine: manager.start(tokens(4)),
    "publish": lambda manager, mine: mine.publish(tokens(3), LONG),
    "finish": lambda manager, mine: mine.finish(tokens(3), LONG),
}


def tokens(salt: int, n: int = LONG) -> list[int]:
    """The first half is the same for each salt."""
    return [1 + i % 7 for i in range(HALF)][:n] + [100 * salt + i for i in range(n - HALF)]


def begun(manager: KVCacheManager, salt: int) -> KVAllocation:
    allocation = manager.start(tokens(salt), kv_length=LONG)
    assert allocation is not None
    rows = np.array([allocation.row], np.int32)
    assert manager.table.reserve_many(rows, np.array([LONG], np.int32)) == 1
    return allocation


def prepared(kind: CacheKind, options: dict[str, Any]) -> tuple[KVCacheManager, KVAllocation]:
    """A cache with an old sequence, one that another has published half of, and one that runs."""
    manager = build_manager(kind, 400, max_batch_size=8, **options)
    old = begun(manager, 1)
    old.finish(tokens(1), LONG)
    other, mine = begun(manager, 2), begun(manager, 3)
    other.publish(tokens(2), HALF + 16)
    return manager, mine


def books(manager: KVCacheManager) -> None:
    manager.check()
    manager.check_running()


def right(manager: KVCacheManager, *rows: KVAllocation) -> None:
    """The books are right, or can be mended; and these rows have the pages that they had."""
    had = [manager.table.get_pages(one.row, 0, manager.table.page_count(one.row)) for one in rows]
    try:
        books(manager)
    except ConservationError:
        manager.mend()
    for one, pages in zip(rows, had, strict=True):
        assert manager.running[one.row] is one
        assert np.array_equal(manager.table.get_pages(one.row, 0, manager.table.page_count(one.row)), pages)


def each_call(kind: CacheKind, options: dict[str, Any], run: Callable[[KVCacheManager, KVAllocation], Any]) -> Any:
    """A manager and its allocation after a fault at the first call, at the second one, and so on."""
    for wanted in count():
        manager, mine = prepared(kind, options)
        seen = count()
        interrupted = Interrupted(lambda place, seen=seen, wanted=wanted: next(seen) == wanted)
        try:
            interrupted(run, manager, mine)
        except InjectedFaultError:
            yield manager, mine
        if interrupted.place is None:
            return


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())
def test_what_a_failed_publish_has_shared_is_known(kind: CacheKind, options: dict[str, Any]) -> None:
    """So the launch can be undone, and no other sequence must start anew."""
    publish: Any = lambda _, one: one.publish(tokens(3), LONG)  # noqa: E731
    faults = 0
    for manager, mine in each_call(kind, options, publish):
        faults += 1
        right(manager, mine)
        pages = manager.table.page_count(mine.row)
        assert mine.unpublish(mine.reused)
        assert manager.table.truncate(mine.row, pages * manager.table.page_size) == 0
        books(manager)
        mine.publish(tokens(3), LONG)
        books(manager)
        mine.finish(tokens(3), LONG)
        books(manager)
    assert faults > 10


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())
def test_a_failed_start_leaves_no_row(kind: CacheKind, options: dict[str, Any]) -> None:
    faults = 0
    for manager, mine in each_call(kind, options, lambda all_, _: all_.start(tokens(4))):
        faults += 1
        right(manager, *manager.running.values())
        assert len(manager.running) == 2
        again = manager.start(tokens(4))
        assert again is not None
        again.discard()
        mine.discard()
        books(manager)
    assert faults > 10


def filled(kind: CacheKind, options: dict[str, Any]) -> tuple[KVCacheManager, list[KVAllocation]]:
    """A cache of several chains with nothing free, and two sequences that hold a part of it."""
    manager, _ = prepared(kind, options)
    for salt in range(10, 14):
        if (more := manager.start(tokens(salt))) is not None:
            manager.table.reserve_many(np.array([more.row], np.int32), np.array([LONG], np.int32))
            more.finish(tokens(salt), LONG)
    return manager, [*manager.running.values()]


def each_line(work: Callable[[], Any], wanted: int) -> bool:
    """Whether this line of the work, of those in the cache, has raised."""
    seen = count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if "/petiole/cache/" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(seen) == wanted:
            raise InjectedFaultError(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except InjectedFaultError:
        return True
    finally:
        sys.settrace(outer)
    return False


@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())
def test_an_eviction_that_stops_between_two_lines_takes_nothing_from_a_sequence(
    kind: CacheKind, options: dict[str, Any]
) -> None:
    for wanted in count():
        manager, rows = filled(kind, options)
        n = min(manager.cache.evictable_page_count(), 120 if kind == "radix" else 5)
        if not each_line(lambda manager=manager, n=n: manager.cache.evict(n), wanted):
            break
        right(manager, *rows)
        for one, salt in zip(rows, (2, 3), strict=True):
            one.finish(tokens(salt), LONG)
            books(manager)
        again = manager.start(tokens(4))
        assert again is not None
        again.finish(tokens(4), LONG)
        books(manager)
    assert wanted > 10 or n == 0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS.keys())
def test_no_line_of_an_admission_or_a_commit_leaves_books_that_cannot_be_mended(
    kind: CacheKind, options: dict[str, Any], change: Callable[[KVCacheManager, KVAllocation], object]
) -> None:
    for wanted in count(step=EVERY):
        manager, (other, mine) = filled(kind, options)
        if not each_line(lambda manager=manager, mine=mine: change(manager, mine), wanted):
            break
        right(manager, other)
        other.finish(tokens(2), LONG)
        books(manager)
    assert wanted > 10
