"""Admission: the waiting queue, deadlines, common prefixes, forks, adapter slots, images on their way to crops.

An image is cut into crops when a prefill needs it soon and the prefix cache does not have it:

    waiting ── its turn is near, its image is in no cache ──► cut on a preparation thread ──► at hand
       ▲                                                                                        │ prefill launched:
       └──────────────────────── preempted: from the beginning ◄── crops dropped ◄──────────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set
from weakref import WeakValueDictionary

from sortedcontainers import SortedDict

from petiole.gpu_worker.exceptions import AdapterError
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence

AHEAD = 16
"""How many images may have crops at a time: the crops of one image take some megabytes."""

RUN_TOKENS = 64
"""A running sequence publishes nothing for a fork that would reuse fewer positions than this."""

Cut = Callable[[RequestImage, Callable[[PreparedImage | Exception], None]], None]
"""Cut an image on another thread, then call the function with the outcome on the engine's."""


class WaitingQueue:
    """Sequences without a row, ordered by rank. Inserting and removing cost O(log n)."""

    def __init__(self) -> None:
        self._by_rank: SortedDict[tuple[int, int], ScheduledSequence] = SortedDict()

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[ScheduledSequence]:
        """Best rank first. Each sequence is looked up when it is reached, so it may be removed while iterating."""
        seq = self.first()
        while seq is not None:
            yield seq
            behind = self._by_rank.bisect_right(seq.rank)
            seq = self._by_rank.peekitem(behind)[1] if behind < len(self._by_rank) else None

    def push(self, seq: ScheduledSequence) -> None:
        self._by_rank[seq.rank] = seq

    def remove(self, seq: ScheduledSequence) -> None:
        """Remove a sequence at any position, if it is in the queue."""
        self._by_rank.pop(seq.rank, None)

    def first(self) -> ScheduledSequence | None:
        return self._by_rank.peekitem(0)[1] if self._by_rank else None

    def last(self) -> ScheduledSequence | None:
        return self._by_rank.peekitem(-1)[1] if self._by_rank else None


class Deadlines:
    """Admitted sequences that must end in time, the earliest first."""

    def __init__(self) -> None:
        self._by_time: SortedDict[tuple[float, tuple[int, int]], ScheduledSequence] = SortedDict()

    def add(self, seq: ScheduledSequence) -> None:
        if seq.request.deadline_s is not None:
            self._by_time[_latest_end(seq)] = seq

    def drop(self, seq: ScheduledSequence) -> None:
        if seq.request.deadline_s is not None and seq.scheduled_s is not None:
            self._by_time.pop(_latest_end(seq), None)

    def pop_due(self, now: float) -> list[ScheduledSequence]:
        """Remove and return the sequences whose deadline has passed."""
        due = []
        while self._by_time and self._by_time.peekitem(0)[0][0] <= now:
            due.append(self._by_time.popitem(0)[1])
        return due

    @property
    def first(self) -> float | None:
        return float(self._by_time.peekitem(0)[0][0]) if self._by_time else None


def _latest_end(seq: ScheduledSequence) -> tuple[float, tuple[int, int]]:
    """And the rank, which is unique."""
    assert seq.scheduled_s is not None
    assert seq.request.deadline_s is not None
    return seq.scheduled_s + seq.request.deadline_s, seq.rank


def can_reuse(seq: ScheduledSequence, other: ScheduledSequence, n_positions: int) -> bool:
    """Whether `seq` can reuse the first `n_positions` of `other` once `other` has prefilled them."""
    left, right = seq.cache_tokens.codes, other.cache_tokens.codes
    return (
        n_positions <= len(right)
        and left[n_positions - 1] == right[n_positions - 1]  # mostly decides without comparing all tokens
        and seq.namespace == other.namespace
        and bool((left[:n_positions] == right[:n_positions]).all())
    )


def forked(seq: ScheduledSequence, running: Iterable[ScheduledSequence], n_cached: int) -> list[ScheduledSequence]:
    """The running sequences of which `seq` is a fork. A fork of a sequence begins with everything that the
    sequence has published, and goes on with positions that it has committed but not published. `n_cached`: the
    cached positions of `seq`.

    A fork contains a part of an answer that somebody has read, so that part was committed before the fork arrived.
    Therefore it suffices to look once, when a sequence arrives, and a sequence without forks costs nothing while
    it decodes."""
    most = seq.prefill_target - RUN_TOKENS
    if most < n_cached:
        return []
    candidates = [other for other in running if other.published <= n_cached]
    return [other for other in candidates if _continues(seq, other, other.published + RUN_TOKENS)]


def _continues(seq: ScheduledSequence, other: ScheduledSequence, n_positions: int) -> bool:
    """Whether the other sequence has committed this many positions, and `seq` begins with them. The last of them
    may lie inside an image."""
    if min(seq.prefill_target, other.kv_position) < n_positions:
        return False
    last = n_positions - 1  # mostly decides without comparing all tokens
    return (
        seq.tokens(last, n_positions)[0] == other.tokens(last, n_positions)[0]
        and seq.namespace == other.namespace
        and bool((seq.cache_tokens.codes[:n_positions] == other.cache_codes(n_positions)).all())
    )


class ImageCropping:
    """Images that are being cut, and crops. Owned by the engine thread.

    A sequence whose image is being cut is passed over. Equal images of several sequences are cut once. At most
    `AHEAD` images are at hand or being cut. Only the best-ranked waiting sequence may exceed that: its image is
    always cut. `fail(seq, error)` ends a request whose image cannot be cut."""

    def __init__(self, cut: Cut, fail: Callable[[ScheduledSequence, Exception], None]) -> None:
        self._cut = cut
        self._fail = fail
        self._at_hand: WeakValueDictionary[int, PreparedImage] = WeakValueDictionary()
        self._being_cut: dict[int, dict[ScheduledSequence, list[RequestImage]]] = {}

    @property
    def busy(self) -> bool:
        """Whether an image is being cut, so that crops will be at hand soon."""
        return bool(self._being_cut)

    def at_hand(self, seq: ScheduledSequence, n_cached: int, *, first: bool) -> bool:
        """Whether all images after the first `n_cached` positions have their crops at hand. Starts to cut the
        images that do not. `first`: no waiting sequence ranks better."""
        ready = True
        for begin, image in seq.images.items():
            if begin < n_cached or image.prepared is not None:
                continue
            image.prepared = self._at_hand.get(image.content_hash)
            if image.prepared is None:
                ready = False
                self._begin(seq, image, first)
        return ready

    def _begin(self, seq: ScheduledSequence, image: RequestImage, first: bool) -> None:
        key = image.content_hash
        waiting = self._being_cut.get(key)
        if waiting is not None:
            waiting.setdefault(seq, []).append(image)
        elif first or len(self._at_hand) + len(self._being_cut) < AHEAD:
            self._cut(image, lambda outcome: self._done(key, outcome))
            self._being_cut[key] = {seq: [image]}

    def _done(self, key: int, outcome: PreparedImage | Exception) -> None:
        for seq, images in self._being_cut.pop(key).items():
            if seq.finalized:
                continue
            if isinstance(outcome, Exception):
                self._fail(seq, outcome)
                continue
            self._at_hand[key] = outcome
            for image in images:
                image.prepared = outcome


class ResidentAdapters:
    """Reference-counted slots of LoRA adapters on the device. `load(key, slot)` copies an adapter into a slot.

    Each sequence holds a reference to its adapter's slot until its last outstanding step. A slot without
    references keeps its adapter until another adapter needs the slot; the least recently used one is replaced
    first. Slot 0 means "no adapter". Adapters are keyed by content (`key`), so a folder whose files change is a
    new adapter. Any error while loading an adapter fails the request that names it."""

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
