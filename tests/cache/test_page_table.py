"""The page table by itself: rows, ownership, what a step reads, and bad input that changes nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from petiole.cache import (
    ConservationError,
    EvictionError,
    MappingError,
    MisalignedError,
    OutOfPagesError,
    OutOfRowsError,
    OwnershipError,
    PageTable,
    RadixPrefixCache,
    RowError,
    StaleNodeError,
)
from tests.cache.toy_kv import texts


def table_with_row(page_size: int = 1, kv: int = 5) -> tuple[PageTable, int]:
    table = PageTable(50, page_size, 6)
    table.set_prefix_cache(RadixPrefixCache(table)) if page_size == 1 else None
    row = table.allocate()
    table.reserve(row, kv)
    return table, row


def test_page_and_row_zero_are_never_handed_out() -> None:
    table = PageTable(5, 1, 4)
    assert sorted(table.allocate_pages(4).tolist()) == [1, 2, 3, 4]
    assert sorted(table.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(OutOfRowsError, match="all 3 rows"):
        table.allocate()
    assert table.num_allocated == 3


def test_erase_gives_back_exactly_what_the_cache_does_not_own() -> None:
    table, row = table_with_row(kv=6)
    pages = table.get_pages(row, 0, 6)
    table.prefix_cache.insert(texts(1, 2), pages[:2])
    free = table.pages_available
    table.erase(row)
    assert table.pages_available == free + 4
    assert set(pages[2:].tolist()) <= set(table.free_pages.tolist())
    table.check()


def test_owned_pages_need_not_be_the_first_ones() -> None:
    table, first = table_with_row(kv=3)
    cache = table.prefix_cache
    cache.insert(texts(1, 2), table.get_pages(first, 0, 2))
    row = table.allocate()
    table.reserve(row, 4)
    result = cache.insert(texts(1, 2, 3, 4), table.get_pages(row, 0, 4))
    assert (result.start, result.end) == (2, 4)  # the row keeps its own copies of the first two
    free = table.pages_available
    table.erase(row)
    assert table.pages_available == free + 2
    table.check()


def test_reserving_for_many_stops_at_the_first_that_does_not_fit() -> None:
    table = PageTable(11, 1, 6)
    rows = np.array([table.allocate() for _ in range(4)])
    assert table.reserve_many(rows, np.array([3, 0, 8, 1])) == 2
    assert [table.page_count(row) for row in rows] == [3, 0, 0, 0]
    assert table.reserve_many(rows, np.array([4, 3, 2, 1])) == 4
    assert table.pages_available == 0
    table.check()


def test_a_row_grows_by_as_much_as_eviction_can_free() -> None:
    table, row = table_with_row(kv=10)
    cache = table.prefix_cache
    node = cache.insert(texts(*range(39)), table.allocate_pages(39)).node
    assert table.pages_available == 0
    cache.lock(node)
    assert not table.reserve(row, 11)
    cache.unlock(node)
    assert not table.reserve(row, 50)
    assert cache.total_cached_pages == 39  # a refusal evicts nothing
    assert table.reserve(row, 49)
    assert (cache.total_cached_pages, table.pages_available) == (0, 0)
    table.check()


BAD_CALLS: dict[str, tuple[Callable[[PageTable, int], object], type[Exception]]] = {
    "a row remapped to pages of its own": (lambda t, r: t.remap(r, 0, t.get_pages(r, 1, 3)), OwnershipError),
    "a row remapped beyond its end": (lambda t, r: t.remap(r, 4, t.node.physical_pages), MappingError),
    "page zero mapped": (lambda t, r: t.map_pages(r, 5, [0]), OwnershipError),
    "a page beyond the table": (lambda t, r: t.map_pages(r, 5, [50]), OwnershipError),
    "a mapping that overlaps": (lambda t, r: t.map_pages(r, 4, t.loose), MappingError),
    "a mapping that leaves a gap": (lambda t, r: t.map_pages(r, 6, t.loose), MappingError),
    "a free page mapped": (lambda t, r: t.map_pages(r, 5, [40]), OwnershipError),
    "another row's page mapped": (lambda t, r: t.map_pages(t.other, 0, t.get_pages(r, 0, 1)), OwnershipError),
    "a page mapped twice": (lambda t, r: t.map_pages(r, 5, [t.loose[0], t.loose[0]]), MappingError),
    "a row that is too long": (lambda t, r: t.map_pages(r, 5, np.full(60, 1)), MappingError),
    "erase of a free row": (lambda t, r: t.erase(5), RowError),
    "erase of the reserved row": (lambda t, r: t.erase(0), RowError),
    "pages of a free row": (lambda t, r: t.get_pages(5, 0, 0), RowError),
    "pages beyond the row": (lambda t, r: t.get_pages(r, 0, 6), MappingError),
    "more pages than there are": (lambda t, r: t.allocate_pages(49), OutOfPagesError),
    "a negative number of pages": (lambda t, r: t.allocate_pages(-1), MisalignedError),
    "the same row twice": (lambda t, r: t.reserve_many(np.array([r, r]), np.array([6, 7])), RowError),
    "reserving in a free row": (lambda t, r: t.reserve_many(np.array([5]), np.array([6])), RowError),
    "eviction of more than there is": (lambda t, r: t.prefix_cache.evict(4), EvictionError),
    "pages that do not match tokens": (
        lambda t, r: t.prefix_cache.insert(texts(1, 2), t.loose[:1]), MisalignedError),
    "an offset that is not a token's": (
        lambda t, r: t.prefix_cache.insert(texts(1, 2), t.loose, None, None, 1, 1), MisalignedError),
    "a node that does not end there": (
        lambda t, r: t.prefix_cache.insert(texts(7, 8, 9), [1, 2, 3], None, t.node, 1, 1), StaleNodeError),
    "free pages cached": (lambda t, r: t.prefix_cache.insert(texts(1, 2), [40, 41]), OwnershipError),
    "a page cached twice": (lambda t, r: t.prefix_cache.insert(texts(1, 2), [t.loose[0]] * 2), OwnershipError),
    "trimming into shared pages": (lambda t, r: t.truncate(t.sharing, 1), OwnershipError),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_named_and_changes_nothing(case: str) -> None:
    call, error = BAD_CALLS[case]
    table, row = table_with_row()
    table.loose = table.allocate_pages(2)
    table.other = table.allocate()
    table.sharing = table.allocate()
    table.node = table.prefix_cache.insert(texts(7, 8, 9), table.allocate_pages(3)).node
    table.map_pages(table.sharing, 0, table.node.physical_pages)

    def state() -> tuple[object, ...]:
        return (
            table.free_pages.tolist(),
            [table.owner(page) for page in range(50)],
            table.num_allocated,
            table.get_pages(row, 0, 5).tolist(),
            table.prefix_cache.total_cached_pages,
            table.prefix_cache.peek(texts(7, 8, 9)),
            table.prefix_cache.evictable_page_count(),
        )

    before = state()
    with pytest.raises(error) as caught:
        call(table, row)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    assert state() == before
    table.prefix_cache.check()


@pytest.mark.parametrize("field", ["n_pages", "page_size", "max_batch_size", "max_pages_per_row"])
def test_a_table_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(MisalignedError, match=field):
        PageTable(**{"n_pages": 10, "page_size": 1, "max_batch_size": 4, field: 0})


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda t, r: t._owner.__setitem__(int(t._matrix[r, 0]), -2),
        lambda t, r: t._owner.__setitem__(40, -1),
        lambda t, r: t._owner.__setitem__(40, 3),
        lambda t, r: t._matrix.__setitem__((r, 1), t._matrix[r, 0]),
        lambda t, r: t._stack.__setitem__(0, t._stack[1]),
        lambda t, r: t._free_rows.append(r),
        lambda t, r: t._row_pages.__setitem__(5, 1),
        lambda t, r: t._owner.__setitem__(0, -2),
    ],
)
def test_the_conservation_check_sees_corruption(corrupt: Callable[[PageTable, int], object]) -> None:
    table, row = table_with_row()
    table.check()
    corrupt(table, row)
    with pytest.raises(ConservationError):
        table.check()
