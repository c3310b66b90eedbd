"""The store of adapters in host memory. Adapter threads read adapters from files; the engine thread takes them.

Adapters are keyed by content. So changed files are a new adapter, with its own slot and cached KV, and copies of
the same files are one adapter.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch

from petiole.gpu_worker.exceptions import AdapterError, ModelError
from petiole.gpu_worker.models.adapters.files import ADAPTER_FILES
from petiole.gpu_worker.models.adapters.lora import AdaptedModel, Adapter, read_adapter
from petiole.gpu_worker.models.checkpoint.finding import resolve_model

K = TypeVar("K")
V = TypeVar("V")
Signature = tuple[tuple[int, int, int], ...]

_REMEMBERED = 20_000
"""How many names, folders and keys to remember: more than `max_waiting`, so that none is forgotten while a request
needs it."""


class AdapterStore:
    """The adapters named by requests. Thread-safe; reading one does not block other threads.

    `kept`: maximum number of adapters in host memory, least recently used ones dropped first. A hub id is resolved
    once; a folder is checked for changes each time. The store remembers the names, folders and keys of the
    `_REMEMBERED` adapters that were used last. `dtype`, `pinned`: as the device copies adapters.
    """

    def __init__(
        self,
        model: AdaptedModel,
        max_rank: int,
        kept: int,
        dtype: torch.dtype = torch.float32,
        pinned: bool = False,
    ) -> None:
        self._model, self._max_rank, self._kept = model, max_rank, kept
        self._dtype, self._pinned = dtype, pinned
        self._folders: OrderedDict[str, Path] = OrderedDict()  # each of them: least recently used first
        self._keys: OrderedDict[Path, tuple[Signature, str]] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()  # by key: the name under which it was last seen
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """Read the adapter, unless it is in memory, and return its content key. Raises AdapterError."""
        return self._read(name)[0]

    def at_hand(self, name: str) -> bool:
        """Whether the adapter is in memory, as far as is known without its files. Does not block."""
        with self._lock:
            folder = self._folders.get(name)
            known = self._keys.get(folder) if folder is not None else None
            return known is not None and known[1] in self._adapters

    def take(self, adapter: str) -> Adapter:
        """The adapter with this content key or name. Raises AdapterError, also if its files have changed."""
        cached = self._cached(adapter)
        if cached is not None:
            return cached
        name = self._names.get(adapter, adapter)
        key, loaded = self._read(name)
        if name != adapter != key:
            raise AdapterError(f"adapter {name}: its files have changed since the request came")
        return loaded

    def _read(self, name: str) -> tuple[str, Adapter]:
        try:
            return self._read_files(name, self._folder(name))
        except AdapterError:
            raise
        except (ModelError, OSError) as error:  # OSError: its files are removed while they are read
            raise AdapterError(f"adapter {name}: {error}") from error

    def _read_files(self, name: str, folder: Path) -> tuple[str, Adapter]:
        files = [folder / file for file in ADAPTER_FILES]
        before = _signature(files)
        signature, key = self._keys.get(folder, ((), ""))
        if signature == before and (cached := self._cached(key)) is not None:
            self._remember(name, folder, before, key)
            return key, cached
        adapter = read_adapter(name, folder, self._model, self._max_rank, self._dtype, self._pinned)
        key = _digest(files)
        if _signature(files) != before:
            raise AdapterError(f"adapter {name}: its files change while they are read")
        self._remember(name, folder, before, key)
        with self._lock:
            _put(self._adapters, key, adapter, self._kept)
        return key, adapter

    def _remember(self, name: str, folder: Path, signature: Signature, key: str) -> None:
        with self._lock:
            _put(self._folders, name, folder, _REMEMBERED)
            _put(self._keys, folder, (signature, key), _REMEMBERED)
            _put(self._names, key, name, _REMEMBERED)

    def _folder(self, name: str) -> Path:
        with self._lock:
            folder = self._folders.get(name)
        return resolve_model(name) if folder is None else folder

    def _cached(self, key: str) -> Adapter | None:
        with self._lock:
            if key in self._adapters:
                self._adapters.move_to_end(key)
            return self._adapters.get(key)


def _put(into: OrderedDict[K, V], key: K, value: V, limit: int) -> None:
    """Insert an entry as the one used last. Entries above the limit go, least recently used first."""
    into[key] = value
    into.move_to_end(key)
    while len(into) > limit:
        into.popitem(last=False)


def _signature(files: Sequence[Path]) -> Signature:
    """File metadata that changes when a file is written, replaced or removed."""
    stats = [file.stat() for file in files if file.exists()]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]
