"""The errors of the cache package.

Every message names the problem, the limit and the value; the state is unchanged. An invalid argument is a
`ValueError`; a call in the wrong state or a shortage is a `RuntimeError`. A broken invariant of the package is an
`AssertionError`, which should not be caught.
"""

from __future__ import annotations


class CacheError(Exception):
    """Base class of the errors of this package, except ConservationError."""


class CacheValueError(CacheError, ValueError):
    """An argument that is invalid in every state."""


class CacheStateError(CacheError, RuntimeError):
    """A call that is not allowed in the current state."""


class TokenError(CacheValueError):
    """A token id, bin or length outside its range."""


class MisalignedError(CacheValueError):
    """Pages and tokens (or positions and rows) do not line up."""


class PageSizeError(CacheValueError):
    """A page size that the cache does not support."""


class RowError(CacheStateError):
    """A row index that is reserved, out of range or not held."""


class MappingError(CacheStateError):
    """A mapping that overlaps what the row has, leaves a gap or does not fit."""


class OwnershipError(CacheStateError):
    """A page with another owner than the operation requires."""


class UnlockWithoutLockError(CacheStateError):
    """An unlock of a node or block that is not locked."""


class StaleNodeError(CacheStateError):
    """A node that has been removed from the cache; only locked nodes may be stored."""


class EvictionError(CacheStateError):
    """More pages requested than can be evicted."""


class OutOfPagesError(CacheStateError):
    """Not enough pages, even after evicting all evictable ones."""


class OutOfRowsError(CacheStateError):
    """All rows are held."""


class ReleasedError(CacheStateError):
    """A `KVAllocation` used after its release."""


class ConservationError(AssertionError):
    """A broken invariant of the page accounting: a bug in this package."""
