"""Which LoRA adapter sits in which device slot.

A slot is held by every sequence that uses it, until the sequence's last outstanding step. A slot that nobody holds
keeps its adapter until somebody else needs the slot: the least recently used one goes first. Slot 0 is "none".
Adapters go by content (`key`), so a folder that has changed is another adapter. What is wrong with an adapter,
whatever it is, is the fault of the request that names it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gpu_worker.errors import AdapterError


class AdapterSlots:
    """`load(key, slot)` puts an adapter into a slot."""

    def __init__(self, n_slots: int, load: Callable[[str, int], None]) -> None:
        self._load = load
        self._n_slots = n_slots
        self._slot_of: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._holders: dict[str, int] = {}

    @property
    def held(self) -> int:
        """Sequences that hold a slot, each counted once."""
        return sum(self._holders.values())

    def must_wait(self, key: str | None) -> bool:
        """Are all slots held by others?"""
        return key is not None and key not in self._slot_of and len(self._holders) >= max(self._n_slots, 1)

    def acquire(self, key: str | None, adapter: str | None) -> int | None:
        """The slot of the adapter with this key, now held once more; `adapter` is how the request names it. None
        when every slot is held by others. Raises AdapterError."""
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
        """The weights have been replaced: nothing in the slots holds any more."""
        assert not self._holders, "adapters are held"
        self._slot_of.clear()

    def _room(self) -> int | None:
        used = set(self._slot_of.values())
        for slot in range(1, self._n_slots + 1):
            if slot not in used:
                return slot
        idle = next((key for key in self._slot_of if key not in self._holders), None)
        return None if idle is None else self._slot_of.pop(idle)
