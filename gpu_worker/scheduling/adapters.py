"""The assignment of LoRA adapters to device slots.

Each sequence holds a reference to its adapter's slot until its last outstanding step. A slot without references
keeps its adapter until another adapter needs the slot; the least recently used one is replaced first. Slot 0 means
"no adapter". Adapters are keyed by content (`key`), so a folder whose files change is a new adapter. Any error
while loading an adapter fails the request that names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set

from petiole.gpu_worker.errors import AdapterError


class AdapterSlots:
    """Reference-counted adapter slots. `load(key, slot)` copies an adapter into a slot."""

    def __init__(self, n_slots: int, load: Callable[[str, int], None]) -> None:
        self._load = load
        self._n_slots = n_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._holders: dict[str, int] = {}

    @property
    def held(self) -> int:
        """Number of sequences that hold a slot."""
        return sum(self._holders.values())

    def must_wait(self, key: str | None, others: Set[str] = frozenset()) -> bool:
        """Whether the adapter has no slot, and no slot is left once the adapters `others` have theirs."""
        if key is None or key in self._slot_of or key in others:
            return False
        return len(self._holders.keys() | others) >= max(self._n_slots, 1)

    def acquire(self, key: str | None, adapter: str | None) -> int | None:
        """Take a reference to the adapter's slot, loading the adapter if needed. Returns the slot, or None if all
        slots are held by other adapters. `adapter` is its name in the request. Raises AdapterError."""
        if key is None or adapter is None:
            return 0
        if self._n_slots == 0:
            raise AdapterError(f"adapter {adapter!r}: this engine has no adapter slots (lora_slots is 0)")
        slot = self._slot_of.get(key)
        if slot is None:
            slot = self._room()
            if slot is None:
                return None
            try:
                self._load(key, slot)
            except AdapterError:
                raise
            except Exception as error:
                raise AdapterError(f"adapter {adapter} cannot be loaded: {error!r}") from error
            self._slot_of[key] = slot
        self._slot_of.move_to_end(key)
        self._holders[key] = self._holders.get(key, 0) + 1
        return slot

    def release(self, key: str | None) -> None:
        if key is None:
            return
        assert self._holders.get(key, 0) > 0, f"adapter {key!r} is not held"
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]

    def forget(self) -> None:
        """Mark all slots as empty, after the weights have been replaced. No slot may be held."""
        assert not self._holders, "adapters are held"
        self._slot_of.clear()

    def _room(self) -> int | None:
        used = set(self._slot_of.values())
        for slot in range(1, self._n_slots + 1):
            if slot not in used:
                return slot
        idle = next((key for key in self._slot_of if key not in self._holders), None)
        return None if idle is None else self._slot_of.pop(idle)
