"""What can go wrong when somebody uses the cache package.

Every error says what was wrong, the limit and the value, and leaves the state as it was.  A caller's mistake
in a value is a `ValueError`, one in the order of calls (or a shortage) is a `RuntimeError`.  A broken
invariant of the package itself is an `AssertionError`: nobody should catch that one.
"""


class CacheError(Exception):
    """Root of the errors of this package."""


class CacheValueError(CacheError, ValueError):
    """An argument that no state of the cache would accept."""


class CacheStateError(CacheError, RuntimeError):
    """A call that the present state does not allow."""


class TokenError(CacheValueError):
    """A token id, bin or length outside its range."""


class MisalignedError(CacheValueError):
    """Pages and tokens (or positions and rows) do not line up."""


class PageSizeError(CacheValueError):
    """A page size that the chosen cache cannot work with."""


class RowError(CacheStateError):
    """A row index that is reserved, out of range or not held."""


class MappingError(CacheStateError):
    """A mapping that overlaps what the row has, leaves a gap or does not fit."""


class OwnershipError(CacheStateError):
    """A page that is not in the state which the operation needs."""


class DoubleFreeError(OwnershipError):
    """A page given back twice."""


class UnlockWithoutLockError(CacheStateError):
    """An unlock of a node or block on which nobody holds a lock."""


class StaleNodeError(CacheStateError):
    """A node that has left its tree: only locked nodes may be kept."""


class EvictionError(CacheStateError):
    """More pages asked for than can be evicted."""


class OutOfPagesError(CacheStateError):
    """Not enough pages, even with all that can be evicted."""


class OutOfRowsError(CacheStateError):
    """All rows are held."""


class ReleasedError(CacheStateError):
    """A sequence's allocation was used after its end."""


class ConservationError(AssertionError):
    """The page accounts do not add up: a defect of this package."""
