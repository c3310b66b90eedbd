"""The KV tier: copies of keys and values in files, beside the prefix cache, which outlive it and the process.

    commit of a chunk, end, preemption ──► copy to the host, in stream order ──► a file        (thread `kv-write`)
    waiting, files hold more than the cache ──► mapped and checked (thread `kv-read`) ──► row, own pages, copy

A *chunk* is 256 positions. A sequence is passed over while its chunks are read. If that takes longer than to
compute them would, or than `LONGEST_WAIT_S`, it starts with what has been read. The engine thread never waits for
a file. What fails is computed: the tier changes no token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from petiole.cache import CacheNamespace, CacheTokens, KVAllocation, KVCacheManager
from petiole.cache.chunk_keys import extend_chunk_keys
from petiole.cache.tokens import page_boundary
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.interface import HostCopy, KVCopies, ModelLimits, Runtime
from petiole.gpu_worker.runtime.memory.chunk_files import ChunkFiles

logger = logging.getLogger(__name__)

CHUNK = 256
"""Positions of a chunk, if pages are not larger."""
MOST_ON_THE_WAY = 256 * 2**20
"""Bytes of copies that wait to be written. Further ones are dropped: a later end of a sequence saves them."""
LONGEST_WAIT_S = 2.0
LEAST_WAIT_S = 0.05
MOST_KNOWN = 1_000_000
"""Keys of which this process remembers that there are files."""
CLOSE_S = 2.0
"""How long a process that ends writes what is on the way."""


@dataclass(slots=True)
class TierCounters:
    """restored_tokens: positions that were copied instead of computed. dropped: chunks that were not written,
    because too many were on the way, or because writing failed. given_up: reads that took too long."""

    saved_chunks: int = 0
    saved_bytes: int = 0
    restored_tokens: int = 0
    dropped_chunks: int = 0
    given_up: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """Chunks of a waiting sequence that are being read. first: the number of the first one. staged: those that
    have been read, in order. n: how many of them the sequence may use. ended: nothing more is read."""

    layout: str
    keys: list[bytes]
    first: int
    deadline: float
    staged: list[Any] = field(default_factory=list)
    n: int = 0
    ended: bool = False


class TieredSequence(Protocol):
    """What the tier knows of a sequence. chunk_keys: of its first chunks, as far as they have been needed. load:
    None until the files have been asked."""

    chunk_keys: list[bytes]
    load: Load | None
    cache_tokens: CacheTokens

    @property
    def namespace(self) -> CacheNamespace: ...

    @property
    def kv_position(self) -> int: ...

    @property
    def prefill_target(self) -> int: ...

    def cached_as(self, n_positions: int) -> CacheTokens: ...


class KVTier:
    """Owned by the engine thread, but for what its two threads do. limits: those of the weights now. post: runs a
    function on the engine thread."""

    def __init__(
        self,
        copies: KVCopies,
        limits: Callable[[], ModelLimits],
        manager: KVCacheManager,
        files: ChunkFiles,
        post: Callable[[Callable[[], None]], None],
        *,
        salted: bool,
    ) -> None:
        self._copies, self._limits, self._manager = copies, limits, manager
        self._post, self._salted = post, salted
        self.files = files
        page_size = manager.table.page_size
        self._size = page_size * max(1, CHUNK // page_size)
        self._reading, self._writing = (ThreadPoolExecutor(1, f"kv-{what}") for what in ("read", "write"))
        self._known: dict[bytes, None] = {}  # keys with files, the oldest first
        self._on_the_way = 0
        self._loads: set[Load] = set()
        self._bytes_per_s = self._tokens_per_s = 0.0  # of reads and of prefills; 0: not known yet
        self.counters = TierCounters()

    @property
    def busy(self) -> bool:
        """Whether chunks are being read, so that a sequence may start soon."""
        return bool(self._loads)

    # ------------------------------------------------------------ restoring

    def at_hand(self, seq: TieredSequence, now: float) -> bool:
        """Whether what the files have of the sequence beyond its cached positions has been read, or is not worth
        the wait. Starts to read."""
        if seq.load is None:
            seq.load = self._begin(seq, now)
        return seq.load.ended

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`. None: nothing is read."""
        return min((load.deadline for load in self._loads), default=None)

    def expire(self, now: float) -> None:
        """Give up what has been read for too long."""
        for load in [load for load in self._loads if load.deadline <= now]:
            self._end(load)
            self.counters.given_up += 1

    def _end(self, load: Load) -> None:
        if load in self._loads:
            self._loads.remove(load)
            load.n, load.ended = len(load.staged), True

    def reach(self, seq: TieredSequence) -> int:
        """The number of leading positions that `restore` makes available if the cache has those before them."""
        load = seq.load
        if load is None or not load.n or load.layout != self._layout:
            return 0
        end = min((load.first + load.n) * self._size, seq.prefill_target - 1)
        return page_boundary(seq.cache_tokens.codes, end, self._manager.table.page_size)

    def restore(self, seq: TieredSequence, allocation: KVAllocation) -> None:
        """Fill the row's own pages behind its cached positions with what has been read, and publish them."""
        load, start, end = seq.load, allocation.reused, self.reach(seq)
        if load is None or end <= start or start < load.first * self._size or end > allocation.kv_capacity:
            return
        for n, staged in enumerate(load.staged[: load.n], load.first):
            begin = max(start, n * self._size)
            slots = self._slots(allocation, begin, min(end, (n + 1) * self._size))
            if len(slots):
                self._copies.from_host(slots, staged, begin - n * self._size)
        allocation.restored(seq.cache_tokens, end)
        self.counters.restored_tokens += end - start
        seq.load = Load("", [], 0, 0.0, ended=True)

    def _begin(self, seq: TieredSequence, now: float) -> Load:
        n_cached = self._manager.match_length(seq.cache_tokens, seq.namespace)
        keys = self._keys(seq, seq.prefill_target)
        first = n_cached // self._size
        load = Load(self._layout, keys[first:], first, now + self._patience(seq.prefill_target - n_cached))
        if load.keys:
            self._loads.add(load)
            self._reading.submit(self._read, load)
        else:
            load.ended = True
        return load

    def _patience(self, n_tokens: int) -> float:
        """Seconds after which it would have been quicker to compute the tokens."""
        if not self._tokens_per_s:
            return LONGEST_WAIT_S
        return min(max(LEAST_WAIT_S, n_tokens / self._tokens_per_s), LONGEST_WAIT_S)

    def _read(self, load: Load) -> None:
        """On the thread that reads."""
        missing = list[bytes]()
        try:
            for key in load.keys if self._pays() else ():
                begun = time.perf_counter()
                copy = None if load.ended else self.files.read(load.layout, key, self._chunk_bytes)
                if copy is None:
                    missing.append(key)
                    break
                load.staged.append(self._copies.staged(copy))
                self._bytes_per_s = _smoothed(self._bytes_per_s, len(copy) / (time.perf_counter() - begun))
        except Exception:
            logger.exception("chunks of the KV tier cannot be read")

        def done() -> None:
            for key in load.keys[: len(load.staged)]:
                self._note(key)
            for key in missing:
                self._known.pop(key, None)
            self._end(load)

        self._post(done)

    def _pays(self) -> bool:
        """Whether reading is quicker than computing, as far as both are known."""
        if not (self._bytes_per_s and self._tokens_per_s):
            return True
        return self._copies.position_bytes / self._bytes_per_s < 1 / self._tokens_per_s

    # ------------------------------------------------------------ saving

    def on_prefill(self, n_tokens: int, seconds: float) -> None:
        """Note how long a step took that computed so many positions of prompts."""
        if n_tokens >= self._size and seconds > 0:
            self._tokens_per_s = _smoothed(self._tokens_per_s, n_tokens / seconds)

    def save(self, seq: TieredSequence, allocation: KVAllocation) -> None:
        """Save the whole chunks of the committed positions that are in no file."""
        if allocation.stale:
            return
        for n, key in enumerate(self._keys(seq, seq.kv_position)):
            if key in self._known:
                continue
            n_bytes = self._chunk_bytes
            if self._on_the_way + n_bytes > MOST_ON_THE_WAY:
                self.counters.dropped_chunks += 1
                return
            copy = self._copies.to_host(self._slots(allocation, n * self._size, (n + 1) * self._size))
            self._writing.submit(self._write, self._layout, key, copy, n_bytes)
            self._note(key)
            self._on_the_way += n_bytes

    def _write(self, layout: str, key: bytes, copy: HostCopy, n_bytes: int) -> None:
        """On the thread that writes."""
        written = False
        try:
            written = self.files.write(layout, key, copy.wait())
        except Exception as error:  # the device has failed: its own waiters say so
            logger.debug("a chunk of the KV tier cannot be copied: %r", error)

        def done() -> None:
            self._on_the_way -= n_bytes
            if written:
                self.counters.saved_chunks += 1
                self.counters.saved_bytes += n_bytes
            else:
                self.counters.dropped_chunks += 1
                self._known.pop(key, None)

        self._post(done)

    def close(self) -> None:
        """Write what is on the way, for `CLOSE_S` at most."""
        self._reading.shutdown(wait=False, cancel_futures=True)
        wait([self._writing.submit(lambda: None)], timeout=CLOSE_S)
        self._writing.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, int]:
        """The counters, by the names that `Engine.stats` has."""
        parts = asdict(self.counters) | asdict(self.files.counters)
        return {f"kv_tier_{name}": n for name, n in parts.items()}

    # ------------------------------------------------------------ internal

    @property
    def _layout(self) -> str:
        return f"{self._limits().fingerprint} {self._copies.layout} x {self._size}"

    @property
    def _chunk_bytes(self) -> int:
        return self._size * self._copies.position_bytes

    def _keys(self, seq: TieredSequence, kv_length: int) -> list[bytes]:
        """The keys of the whole chunks up to `kv_length`. None of a tenant's own, unless the settings allow it."""
        if kv_length < self._size or (seq.namespace.salt is not None and not self._salted):
            return []
        n = kv_length // self._size
        if len(seq.chunk_keys) < n:
            known = seq.cache_tokens.kv_length >= kv_length
            tokens = seq.cache_tokens if known else seq.cached_as(kv_length)
            extend_chunk_keys(seq.chunk_keys, tokens, seq.namespace, self._size, kv_length)
        return seq.chunk_keys[:n]

    def _slots(self, allocation: KVAllocation, start: int, end: int) -> npt.NDArray[np.int64]:
        """The slots of positions [start, end), which begin and end with a page."""
        table = self._manager.table
        size = table.page_size
        pages = table.get_pages(allocation.row, start // size, max(start, end) // size).astype(np.int64)
        return (pages[:, None] * size + np.arange(size)).ravel()

    def _note(self, key: bytes) -> None:
        self._known[key] = None
        while len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)


def _smoothed(mean: float, new: float) -> float:
    return new if not mean else 0.8 * mean + 0.2 * new


def open_tier(
    config: EngineConfig,
    runtime: Runtime,
    manager: KVCacheManager,
    post: Callable[[Callable[[], None]], None],
) -> KVTier | None:
    """The tier of the settings; None if it is off, or if it does not keep the KV of such a model. Raises
    InvalidRequest."""
    if not config.kv_tier:
        return None
    if runtime.kv_copies is None or manager.has_groups or config.prefix_cache == "off":
        logger.info(
            "kv_tier=%s is ignored: it needs a prefix cache, and layers without windows or states", config.kv_tier
        )
        return None
    files = ChunkFiles(Path(config.kv_tier).expanduser(), int(config.kv_tier_gib * 2**30))
    return KVTier(runtime.kv_copies, lambda: runtime.limits, manager, files, post, salted=config.kv_tier_salted)
