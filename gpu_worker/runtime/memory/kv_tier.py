"""The KV tier: copies of keys and values in files, beside the prefix cache, which outlive it and the process.

    commit of a chunk, end, preemption ──► copy to the host, in stream order ──► a file        (thread `kv-write`)
    waiting, files hold more than the cache ──► read and checked (thread `kv-read`) ──► row, own pages, copy

A *chunk* is 64 positions. A sequence is passed over while its chunks are read. If that takes longer than to
compute them would, or than `LONGEST_WAIT_S`, it starts with what has been read. The engine thread never waits for
a file. What fails is computed: the tier changes no token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from petiole.cache import CacheNamespace, CacheTokens, KVAllocation, KVCacheManager
from petiole.cache.tokens import page_boundary
from petiole.contract.errors import InvalidRequest
from petiole.contract.settings.engine import SWITCHES, EngineConfig, switch
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.runtime.interface import HostCopy, KVCopies, ModelLimits, Runtime
from petiole.gpu_worker.runtime.memory.chunk_files import ChunkFiles, extend_chunk_keys

logger = logging.getLogger(__name__)

CHUNK = 64
"""Positions of a chunk, if pages are not larger."""
VERSION = 1
"""The version of the numbers in files. Raise it with each change that gives keys or values other bits."""
RING_BYTES, MOST_RING_BYTES = 2**28, 2**30
"""The room for copies on their way to files: on the host, pinned, and as much on the device. The second is for a
ring that holds what one step computes."""
RING_SHARE = 16
"""Such a ring is at most this part of the pool: memory beside the pool is for much else."""
MOST_HELD = 2**30
"""Bytes that were read, or will be, for sequences that wait. The first one may always be read."""
LONGEST_WAIT_S = 2.0
LEAST_WAIT_S = 0.05
REGAINED = 1.05
"""By so much the rate of files is thought higher each time when nothing was read because of it."""
ARITHMETIC = [name for name in SWITCHES if name != "progress"]
"""The switches that decide which kernels compute keys and values."""
MOST_KNOWN = 1_000_000
"""Keys of which this process remembers that there are files."""
CLOSE_S = 2.0
"""How long a process that ends writes what is on the way."""


@dataclass(slots=True)
class TierCounters:
    """restored_tokens: positions that were copied instead of computed. dropped: chunks that were not written,
    because too many were on the way when their sequence left its row, or because writing failed. given_up: reads
    that took too long."""

    saved_chunks: int = 0
    saved_bytes: int = 0
    restored_tokens: int = 0
    dropped_chunks: int = 0
    given_up: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Load:
    """Chunks of a waiting sequence that are being read. first: the number of the first one. staged: those that
    have been read, in order. n: how many of them the sequence may use. ended: nothing more is read."""

    layout: str = ""
    keys: list[bytes] = field(default_factory=list)
    first: int = 0
    deadline: float = 0.0
    staged: list[Any] = field(default_factory=list)
    n: int = 0
    ended: bool = True


class TieredSequence(Protocol):
    """What the tier knows of a sequence. tiered: whether its KV may be in files. chunk_keys: of its first chunks,
    as far as they have been needed. n_copied: of these, in its present row, how many `KVTier.follow` need not look
    at again. load: None until the files have been asked."""

    tiered: bool
    chunk_keys: list[bytes]
    n_copied: int
    load: Load | None
    cache_tokens: CacheTokens

    @property
    def namespace(self) -> CacheNamespace: ...

    @property
    def kv_position(self) -> int: ...

    @property
    def prefill_target(self) -> int: ...

    def cached_as(self, n_positions: int) -> CacheTokens: ...


@dataclass(slots=True)
class Rates:
    """How fast files are read and prompts are computed: means of what has been measured. 0: not known yet."""

    bytes_per_s: float = 0.0
    tokens_per_s: float = 0.0

    def on_read(self, n_bytes: int, seconds: float) -> None:
        self.bytes_per_s = _smoothed(self.bytes_per_s, n_bytes / seconds)

    def on_prefill(self, n_tokens: int, seconds: float) -> None:
        self.tokens_per_s = _smoothed(self.tokens_per_s, n_tokens / seconds)

    def patience_s(self, n_tokens: int) -> float:
        """Seconds after which it would have been quicker to compute the tokens."""
        if not self.tokens_per_s:
            return LONGEST_WAIT_S
        return min(max(LEAST_WAIT_S, n_tokens / self.tokens_per_s), LONGEST_WAIT_S)

    def reading_pays(self, position_bytes: int) -> bool:
        """Whether reading is quicker than computing. Each refusal raises what is thought of the files, so that
        they are tried again."""
        if not (self.bytes_per_s and self.tokens_per_s):
            return True
        pays = position_bytes / self.bytes_per_s < 1 / self.tokens_per_s
        if not pays:
            self.bytes_per_s *= REGAINED
        return pays


def _smoothed(mean: float, new: float) -> float:
    return new if not mean else 0.8 * mean + 0.2 * new


class _Worker:
    """A thread that runs jobs in order, and that no exit waits for. busy_since: of `time.monotonic`, when the
    present job has begun; None: there is none."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.busy_since: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def end(self, timeout_s: float) -> None:
        """Do what has been put, but wait no longer than this for it."""
        done = threading.Event()
        self.put(done.set)
        self._jobs.put(None)
        done.wait(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.busy_since = time.monotonic()
            try:
                job()
            except Exception:
                logger.exception("a file of the KV tier could not be handled: its KV is computed")
            self.busy_since = None
            del job


class KVTier:
    """Owned by the engine thread, but for what its two threads do. config: decided. limits: those of the weights
    now. post: runs a function on the engine thread."""

    def __init__(
        self,
        config: EngineConfig,
        copies: KVCopies,
        limits: Callable[[], ModelLimits],
        manager: KVCacheManager,
        files: ChunkFiles,
        post: Callable[[Callable[[], None]], None],
        tracer: Tracer = NO_TRACE,
    ) -> None:
        self._span = tracer.span
        self._copies, self._limits, self._manager = copies, limits, manager
        self._post, self._salted = post, config.kv_tier_salted
        self._arithmetic = " ".join((config.dtype, *(f"{name}={switch(name)}" for name in ARITHMETIC)))
        self.files = files
        page_size = manager.table.page_size
        self._size = page_size * max(1, CHUNK // page_size)
        copies.make_ring(self._ring_blocks(config.max_num_batched_tokens), self._size)
        self._reader, self._writer = _Worker("kv-read"), _Worker("kv-write")
        self._known: dict[tuple[str, bytes], None] = {}  # layouts and keys with files, the oldest first
        self._loads: set[Load] = set()  # being read
        self._held: WeakSet[Load] = WeakSet()  # of sequences that wait, with what has been read
        self._rates = Rates()
        self.counters = TierCounters()

    @property
    def busy(self) -> bool:
        """Whether chunks are being read, so that a sequence may start soon."""
        return bool(self._loads)

    # ------------------------------------------------------------ restoring

    def at_hand(self, seq: TieredSequence, now: float, *, first: bool) -> bool:
        """Whether what the files have of the sequence beyond its cached positions has been read, or is not worth
        the wait. Starts to read. first: no waiting sequence ranks better."""
        if seq.load is None:
            seq.load = self._begin(seq, now, first)
        return seq.load is not None and seq.load.ended

    @property
    def next_deadline(self) -> float | None:
        """When to call `expire`. None: nothing is read, or no sequence could start."""
        if not self._manager.table.rows_available:
            return None
        return min((load.deadline for load in self._loads), default=None)

    def expire(self, now: float) -> None:
        """Give up what has been read for too long, if a sequence could start."""
        if self._loads and self._manager.table.rows_available:
            for load in [load for load in self._loads if load.deadline <= now]:
                self._end(load)
                self.counters.given_up += 1

    def _end(self, load: Load) -> None:
        if load in self._loads:
            self._loads.remove(load)
            load.n, load.ended = len(load.staged), True

    def reach(self, seq: TieredSequence, n_cached: int) -> int:
        """The number of leading positions that `restore` makes available behind the `n_cached` that the cache
        has."""
        load = seq.load
        if load is None or n_cached < load.first * self._size or load.layout != self._layout:
            return n_cached
        end = min((load.first + load.n) * self._size, seq.prefill_target - 1)
        return max(n_cached, page_boundary(seq.cache_tokens.codes, end, self._manager.table.page_size))

    def restore(self, seq: TieredSequence, allocation: KVAllocation) -> None:
        """Fill the row's own pages behind its cached positions with what has been read, and publish them. If that
        fails, they are computed."""
        start, end, load = allocation.reused, self.reach(seq, allocation.reused), seq.load
        seq.load, seq.n_copied = Load(), 0
        if load is None or end <= start or end > allocation.kv_capacity:
            return
        try:
            with self._span("restore"):
                for n, staged in enumerate(load.staged[: load.n], load.first):
                    begin, behind = max(start, n * self._size), min(end, (n + 1) * self._size)
                    if begin < behind:
                        slots = self._slots(allocation, begin, behind)
                        self._copies.from_host(slots, staged, begin - n * self._size)
        except Exception:
            logger.exception("KV cannot be copied from the host: it is computed")
            return
        allocation.restored(seq.cache_tokens, end)
        self.counters.restored_tokens += end - start

    def _begin(self, seq: TieredSequence, now: float, first: bool) -> Load | None:
        """What is read for a sequence. None: too much is held for others."""
        if seq.prefill_target < self._size or self._hangs:
            return Load()
        most = max(1, MOST_HELD // self._chunk_bytes)
        held = sum(len(load.keys) for load in self._held)
        if held >= most and not first:
            return None
        n_cached = self._manager.match_length(seq.cache_tokens, seq.namespace)
        begin = n_cached // self._size
        keys = self._keys(seq, seq.prefill_target)[begin : begin + most]
        if held + len(keys) > most and not first:
            return None
        if not keys or not self._rates.reading_pays(self._copies.position_bytes):
            return Load()
        deadline = now + self._rates.patience_s(seq.prefill_target - n_cached)
        load = Load(self._layout, keys, begin, deadline, ended=False)
        self._reader.put(lambda: self._read(load))
        self._loads.add(load)
        self._held.add(load)
        return load

    @property
    def _hangs(self) -> bool:
        """Whether one read has taken so long that others would not come in time, either."""
        since = self._reader.busy_since
        return since is not None and time.monotonic() - since > LONGEST_WAIT_S

    def _read(self, load: Load) -> None:
        """On the thread that reads."""
        n_bytes = self._chunk_bytes
        try:
            for key in load.keys:
                begun = time.perf_counter()
                with self._span("read"):
                    staged = self._copies.staging(n_bytes)
                    if load.ended or not self.files.read(load.layout, key, np.asarray(staged)):
                        break
                    load.staged.append(staged)
                self._rates.on_read(n_bytes, time.perf_counter() - begun)
        finally:
            self._post(lambda: self._have_read(load))

    def _have_read(self, load: Load) -> None:
        n = len(load.staged)
        for key in load.keys[:n]:
            self._note(load.layout, key)
        if not load.ended:  # the next one is not there, and what follows may not be
            self._forget(load.layout, load.keys[n:])
        self._end(load)

    # ------------------------------------------------------------ saving

    def on_prefill(self, n_tokens: int, seconds: float) -> None:
        """Note how long a step took that computed so many positions of prompts."""
        if n_tokens >= self._size and seconds > 0:
            self._rates.on_prefill(n_tokens, seconds)

    def follow(self, seq: TieredSequence, allocation: KVAllocation) -> None:
        """Save the further whole chunks of the committed positions that are in no file, as far as the ring has
        room; later calls save the others."""
        if seq.kv_position // self._size > seq.n_copied and not allocation.stale:
            keys = self._keys(seq, seq.kv_position)
            while seq.n_copied < len(keys) and self._copy(allocation, seq.n_copied, keys[seq.n_copied]):
                seq.n_copied += 1

    def save(self, seq: TieredSequence, allocation: KVAllocation) -> None:
        """Save all that is in no file before a sequence leaves its row, also what could not be written before."""
        if not allocation.stale:
            copied = [self._copy(allocation, n, key) for n, key in enumerate(self._keys(seq, seq.kv_position))]
            self.counters.dropped_chunks += copied.count(False)

    def _copy(self, allocation: KVAllocation, n: int, key: bytes) -> bool:
        """Have chunk n written, unless there is a file. Returns False if the ring is full."""
        layout = self._layout
        if (layout, key) in self._known:
            return True
        copy = self._copies.to_host(self._slots(allocation, n * self._size, (n + 1) * self._size))
        if copy is None:
            return False
        self._writer.put(partial(self._write, layout, key, copy))
        self._note(layout, key)
        return True

    def touch(self, seq: TieredSequence, n_reused: int) -> None:
        """Note that the files of a sequence that leaves are in use, also if it found its KV in the cache.
        n_reused: positions that somebody else had computed."""
        layout, keys = self._layout, self._keys(seq, seq.kv_position)
        if not keys:
            return
        again = n_reused // self._size

        def touch() -> None:
            if gone := self.files.touch(layout, keys, again):
                self._post(lambda: self._forget(layout, gone))

        self._writer.put(touch)

    def _write(self, layout: str, key: bytes, copy: HostCopy) -> None:
        """On the thread that writes."""
        written = False
        try:
            with self._span("write"):
                written = self.files.write(layout, key, copy.wait())
        finally:  # if the device has failed, its own waiters say so
            copy.release()
            self._post(lambda: self._have_written(layout, key, written))

    def _have_written(self, layout: str, key: bytes, written: bool) -> None:
        if written:
            self.counters.saved_chunks += 1
            self.counters.saved_bytes += self._chunk_bytes
        else:
            self.counters.dropped_chunks += 1
            self._known.pop((layout, key), None)

    def close(self) -> None:
        """Write what is on the way, for `CLOSE_S` at most."""
        self._reader.end(0)
        self._writer.end(CLOSE_S)

    def stats(self) -> dict[str, int]:
        """The counters, and the bytes of all files, by the names that `Engine.stats` has."""
        parts = {"bytes": self.files.bytes} | asdict(self.counters) | asdict(self.files.counters)
        return {f"kv_tier_{name}": n for name, n in parts.items()}

    # ------------------------------------------------------------ internal

    @property
    def _layout(self) -> str:
        """Processes that compute keys and values in other ways have other layouts: none reads another's files."""
        limits = self._limits()
        computing, weights = limits.computing, f"{limits.fingerprint} {limits.files}"
        kernels = f"{limits.device} {computing.kernels} {computing.instructions} {self._arithmetic}"
        return f"{VERSION} {weights} {kernels} {self._copies.layout} x {self._size}"

    def _ring_blocks(self, step: int) -> int:
        """As many as one step of so many positions completes, within the bounds."""
        table = self._manager.table
        pool = table.total_pages * table.page_size * self._copies.position_bytes
        most = max(
            RING_BYTES, min(MOST_RING_BYTES, pool // RING_SHARE, -(-step // self._size) * self._chunk_bytes)
        )
        return max(1, most // self._chunk_bytes)

    @property
    def _chunk_bytes(self) -> int:
        return self._size * self._copies.position_bytes

    def _keeps(self, seq: TieredSequence) -> bool:
        """Whether its KV may be in files: not that of a tenant's own, unless the settings allow it."""
        return seq.tiered and (self._salted or seq.namespace.salt is None)

    def _keys(self, seq: TieredSequence, kv_length: int) -> list[bytes]:
        """The keys of the whole chunks up to `kv_length`, if they may be in files."""
        if kv_length < self._size or not self._keeps(seq):
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
        pages = table.get_pages(allocation.row, start // size, end // size).astype(np.int64)
        return (pages[:, None] * size + np.arange(size)).ravel()

    def _forget(self, layout: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._known.pop((layout, key), None)

    def _note(self, layout: str, key: bytes) -> None:
        self._known[layout, key] = None
        while len(self._known) > MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)


def open_files(config: EngineConfig) -> ChunkFiles | None:
    """The folder of the settings; None without one. Raises InvalidRequest."""
    if not config.kv_tier:
        return None
    try:
        folder = Path(config.kv_tier).expanduser()
    except RuntimeError as error:
        raise InvalidRequest("kv_tier", f"must be a folder ({error})", config.kv_tier) from error
    return ChunkFiles(folder, int(config.kv_tier_gib * 2**30))


def open_tier(
    config: EngineConfig,
    files: ChunkFiles | None,
    runtime: Runtime,
    manager: KVCacheManager,
    post: Callable[[Callable[[], None]], None],
    tracer: Tracer,
) -> KVTier | None:
    """The tier over these files; None without any, or if it does not keep the KV of such a model."""
    if files is None:
        return None
    if runtime.kv_copies is None or manager.has_groups or config.prefix_cache == "off":
        logger.info("kv_tier=%s is ignored: it needs a prefix cache, and layers without states", config.kv_tier)
        return None
    return KVTier(config, runtime.kv_copies, lambda: runtime.limits, manager, files, post, tracer)
