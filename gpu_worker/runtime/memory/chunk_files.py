"""Files with the KV of chunks, in one folder that all workers of a machine share.

    FOLDER/layout/key.kv      a header of 4,096 bytes, then the keys and values

A file is written under another name, with all its blocks allocated, and renamed; then it is never changed. It is
read into memory, and not mapped: an error of the disk is an error of a call, and not a SIGBUS. The header holds
layout, key and checksum; a file that differs in one of them is removed, and its chunk computed again. Without
`fsync`, a power cut leaves files that the checksum refuses. Nothing else in the folder is touched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from petiole.cache import CacheNamespace, CacheTokens
from petiole.contract.errors import InvalidRequest, require

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

HEADER = 4096
_CHECKSUM = 16
_FORMAT = 1
_UNFINISHED_S = 600.0
"""A file of another process that has been unfinished for so long will stay so."""
_QUIET_S = 60.0
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PAUSE_S = 1.0
"""For so long nothing is written after a write has failed."""
_USED_AGAIN = 0o400
"""The mode of a file that has been used again, by which all processes know it. Nobody writes to a file anyway."""
_LAPSES_S = 86_400.0
"""A file that nobody has used for so long counts as used once: its layout's model may be gone."""
ONCE = 0.2
"""The share of all bytes that files used again leave to files that have been used once."""
_LAYOUT, _FILE = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}\.kv|[0-9a-f]{16}\.tmp")


@dataclass(slots=True)
class FileCounters:
    """evicted, damaged: files removed. failed: reads and writes that raised."""

    evicted: int = 0
    damaged: int = 0
    failed: int = 0


class ChunkFiles:
    """The files of a folder. Used by one thread that reads and one that writes; other processes use the same
    folder.

    most_bytes: of all files; each further process that writes may exceed it by a fiftieth. bytes: of all files at
    this process's last look, with what it has written since."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises InvalidRequest for a folder in which other users may write."""
        self._folder, self._most = folder, most_bytes
        self.counters = FileCounters()
        self.bytes = 0
        self._unseen = 0  # bytes written since the last look at all files
        self._quiet_until = self._paused_until = 0.0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            limit = f"must be a folder that this user may write to ({error})"
            raise InvalidRequest("kv_tier", limit, str(folder)) from error
        own = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        own = own and stat.S_ISDIR(status.st_mode)
        require(own, "kv_tier", "must be a folder in which only this user may write, and no link", str(folder))
        self.evict(most_bytes - self._most_unseen)

    @property
    def _most_unseen(self) -> int:
        """Bytes that this process writes between two looks at all files."""
        return self._most // 50

    def read(self, layout: str, key: bytes, content: Bytes) -> bool:
        """Fill an array with the content of a file. Returns False if there is none, or one that is damaged."""
        path = self._path(layout, key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._fails("read", error)
            return False
        try:
            if os.fstat(descriptor).st_size == HEADER + len(content):
                header = bytearray(HEADER)
                _read_into(descriptor, 0, memoryview(header))
                _read_into(descriptor, HEADER, content.data)
                if header == _header(layout, key, content):
                    os.utime(descriptor)
                    os.fchmod(descriptor, _USED_AGAIN)
                    return True
            self.counters.damaged += 1
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._fails("read", error)
        finally:
            os.close(descriptor)
        return False

    def touch(self, layout: str, keys: Sequence[bytes], n_again: int = 0) -> list[bytes]:
        """Note that files are used, the first one last: of a chain, the end is evicted first. n_again: how many of
        the first ones somebody else has computed. Returns the keys of those that are gone."""
        gone, now = [], time.time_ns()
        for n, key in enumerate(keys):
            path = self._path(layout, key)
            try:
                os.utime(path, ns=(now - n, now - n))
                if n < n_again:
                    os.chmod(path, _USED_AGAIN)
            except OSError:
                gone.append(key)
        return gone

    def write(self, layout: str, key: bytes, content: Bytes) -> bool:
        """Write a file, unless it is there. Returns False if that failed, for example because the disk is full."""
        path, size = self._path(layout, key), HEADER + len(content)
        if time.monotonic() < self._paused_until:
            return False
        try:
            if path.exists():
                return True
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if self._unseen + size > self._most_unseen:
                self.evict(self._most - max(size, self._most_unseen))
            self._write(path, _header(layout, key, content), content)
        except OSError as error:
            self._fails("written", error)
            self._paused_until = time.monotonic() + _PAUSE_S
            if error.errno in _FULL:
                self.evict(None)
            return False
        self._unseen += size
        self.bytes += size
        return True

    @staticmethod
    def _write(path: Path, header: bytes, content: Bytes) -> None:
        unfinished = path.with_name(f"{secrets.token_hex(8)}.tmp")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER + len(content))
            at = 0
            for part in (memoryview(header), content.data):
                while len(part):
                    n = os.pwrite(descriptor, part, at)
                    part, at = part[n:], at + n
            os.rename(unfinished, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(descriptor)

    def evict(self, most_bytes: int | None) -> None:
        """Remove the least recently used files until all others have at most `most_bytes`; None: a tenth of
        them. Those that have been used once go first, as long as they are more than `ONCE` of all. So a pass over
        many texts takes nothing from conversations, and new ones have room (segmented LRU: Karedla, Love and
        Wherry, 1994)."""
        found = sorted(self._files(), key=lambda file: file.used)
        total = sum(file.size for file in found)
        most = int(0.9 * total) if most_bytes is None else most_bytes
        queues = {again: deque(file for file in found if file.again == again) for again in (False, True)}
        once = sum(file.size for file in queues[False])
        while total > most and (queues[False] or queues[True]):
            again = not queues[False] or (once <= ONCE * most and bool(queues[True]))
            file = queues[again].popleft()
            once -= 0 if again else file.size
            with suppress(OSError):
                os.unlink(file.path)
                self.counters.evicted += 1
            total -= file.size
        self.bytes, self._unseen = total, 0

    def _files(self) -> Iterator[_File]:
        """Removes those that nobody will finish."""
        now = time.time()
        for folder in _entries(self._folder, _LAYOUT):
            for entry in _entries(folder.path, _FILE):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".tmp") and now - status.st_mtime > _UNFINISHED_S:
                        os.unlink(entry.path)
                    else:
                        again = not status.st_mode & stat.S_IWUSR and now - status.st_mtime < _LAPSES_S
                        yield _File(status.st_mtime_ns, status.st_size, entry.path, again)

    def _path(self, layout: str, key: bytes) -> Path:
        return self._folder / hashlib.blake2b(layout.encode(), digest_size=16).hexdigest() / f"{key.hex()}.kv"

    def _fails(self, what: str, error: OSError) -> None:
        self.counters.failed += 1
        if (now := time.monotonic()) >= self._quiet_until:
            self._quiet_until = now + _QUIET_S
            logger.warning("a file of kv_tier cannot be %s: %s", what, error)


class _File(NamedTuple):
    """used: when it was used last. again: whether it has been of use to anybody but who wrote it, and its mark has
    not lapsed."""

    used: int
    size: int
    path: str
    again: bool


def _header(layout: str, key: bytes, content: Bytes) -> bytes:
    about = {"format": _FORMAT, "layout": layout, "key": key.hex(), "bytes": len(content)}
    text = json.dumps(about).encode()
    return text[: HEADER - _CHECKSUM].ljust(HEADER - _CHECKSUM) + xxhash.xxh3_128_digest(content.data)


def _entries(folder: Path | str, names: re.Pattern[str]) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        return [entry for entry in entries if names.fullmatch(entry.name) and not entry.is_symlink()]
    return []


def _read_into(descriptor: int, at: int, target: memoryview) -> None:
    """Raises OSError if the file ends before."""
    while len(target):
        n = os.preadv(descriptor, [target], at)
        if not n:
            raise OSError(errno.EIO, "the file has been cut")
        at, target = at + n, target[n:]


def extend_chunk_keys(
    keys: list[bytes], tokens: CacheTokens, namespace: CacheNamespace, size: int, kv_length: int
) -> None:
    """Append the keys of the further whole chunks of `size` positions up to `kv_length`. keys: those of the
    sequence's first chunks.

    The key of a chunk is a hash of the key before it, and of the content of its positions. So equal keys mean that
    everything up to the chunk's end is equal. The first one follows from the namespace."""
    reuse = namespace.lora_id, namespace.image_hash, namespace.salt
    for n in range(len(keys), kv_length // size):
        before = keys[-1] if keys else _hash(repr(reuse).encode())
        keys.append(_hash(before + tokens.content(n * size, (n + 1) * size)))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
