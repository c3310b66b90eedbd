"""Adapters on their way from files to device slots: read by preparation threads, taken by the engine thread.

An adapter is named by its content, so that files which have changed are another adapter, with a slot and cached KV
of its own, and copies of the same files are one.
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
    """The adapters that requests have named. Thread-safe; nobody waits while another reads.

    `kept`: how many read adapters stay in host memory, the last used ones. A hub id is asked for once; a folder is
    looked at each time.
    """

    def __init__(self, config: ModelConfig, max_rank: int, kept: int) -> None:
        self._config, self._max_rank, self._kept = config, max_rank, kept
        self._folders: dict[str, Path] = {}
        self._keys: dict[Path, tuple[Signature, str]] = {}
        self._names: dict[str, str] = {}  # of each key, under which it was last seen
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """Read the adapter, unless it is there already, and name its content. Raises AdapterError."""
        return self._read(name)[0]

    def take(self, adapter: str) -> Adapter:
        """The adapter that `key` returned this key for, or the one of this name. Raises AdapterError."""
        found = self._found(adapter)
        if found is not None:
            return found
        name = self._names.get(adapter, adapter)
        key, found = self._read(name)
        if name != adapter != key:
            raise AdapterError(f"adapter {name}: its files have changed since the request came")
        return found

    def _read(self, name: str) -> tuple[str, Adapter]:
        folder = self._folder(name)
        files = [folder / file for file in ADAPTER_FILES]
        before = _signature(files)
        signature, key = self._keys.get(folder, ((), ""))
        if signature == before and (found := self._found(key)) is not None:
            return key, found
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
            try:
                folder = self._folders[name] = resolve_model(name)
            except ModelError as error:
                raise AdapterError(f"adapter {name}: {error}") from error
        return folder

    def _found(self, key: str) -> Adapter | None:
        with self._lock:
            if key in self._adapters:
                self._adapters.move_to_end(key)
            return self._adapters.get(key)


def _signature(files: Sequence[Path]) -> Signature:
    """What changes when a file is written to, replaced or taken away."""
    stats = [file.stat() for file in files if file.exists()]
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]
