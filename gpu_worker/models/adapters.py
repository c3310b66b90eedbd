"""Host-side store of adapters: threads of their own read them from files, the engine thread takes them.

Adapters are keyed by content. So changed files are a new adapter, with its own slot and cached KV, and copies of
the same files are one adapter.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from gpu_worker.errors import AdapterError, ModelError
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.loading import resolve_model
from gpu_worker.models.lora import ADAPTER_FILES, Adapter, read_adapter

Signature = tuple[tuple[int, int, int], ...]


class AdapterStore:
    """The adapters named by requests. Thread-safe; reading one does not block other threads.

    `kept`: maximum number of adapters in host memory, least recently used ones dropped first. A hub id is resolved
    once; a folder is checked for changes each time.
    """

    def __init__(self, config: ModelConfig, max_rank: int, kept: int) -> None:
        self._config, self._max_rank, self._kept = config, max_rank, kept
        self._folders: dict[str, Path] = {}
        self._keys: dict[Path, tuple[Signature, str]] = {}
        self._names: dict[str, str] = {}  # of each key, under which it was last seen
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """Read the adapter, unless it is in memory, and return its content key. Raises AdapterError."""
        return self._read(name)[0]

    def at_hand(self, name: str) -> bool:
        """Whether the adapter is in memory, as far as is known without its files. Does not block."""
        folder = self._folders.get(name)
        return folder in self._keys and self._keys[folder][1] in self._adapters

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
            return key, cached
        adapter = read_adapter(name, folder, self._config, self._max_rank)
        key = _digest(files)
        if _signature(files) != before:
            raise AdapterError(f"adapter {name}: its files change while they are read")
        with self._lock:
            self._keys[folder], self._names[key] = (before, key), name
            self._adapters[key] = adapter
            while len(self._adapters) > self._kept:
                self._adapters.popitem(last=False)
        return key, adapter

    def _folder(self, name: str) -> Path:
        folder = self._folders.get(name)
        if folder is None:
            folder = self._folders[name] = resolve_model(name)
        return folder

    def _cached(self, key: str) -> Adapter | None:
        with self._lock:
            if key in self._adapters:
                self._adapters.move_to_end(key)
            return self._adapters.get(key)


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
