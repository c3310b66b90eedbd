"""Where the files of /files are: `PETIOLE_GATEWAY_FILES`, a folder or a URL that all gateways and workers see.

A file of one gateway must be there for all. So the first gateway leaves a marker in the storage, and its content
in Redis; a gateway that finds another content is in another folder of the same name, and serves no files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import TypeVar

from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.serving.retry import patiently
from petiole.tasks.app.thread_executor import ProcessThreads
from petiole.tasks.errors import BatchError
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches import segments
from petiole.tasks.submission.batches.files import roots, storage
from petiole.tasks.wire.keys import gateway_key

THREADS = ProcessThreads("files", size=4, most=1000)
KNOWN_FOR_S = 60.0
SWEPT_EVERY_S = 3600.0
UNFINISHED_FOR_S = 86_400.0
"""A file that is unfinished for longer is of a process that has died."""
_MARKER = "petiole-files"
_REMEMBERED_S = 30 * 86_400
_MARKED_WITHIN_S = 30
_TRIES, _PAUSE_S = 10, 0.1

T = TypeVar("T")


async def blocking(call: Callable[[], T]) -> T:
    """What the call returns, which reads or writes files of the storage alone, or asks Redis. It may be made
    again. Raises `Failure`."""

    def confined() -> T:
        with below_root():
            return call()

    try:
        return await patiently(lambda: THREADS.run(confined))
    except BatchError as error:
        raise Failure(
            503, f"the files cannot be reached at the moment: {error}", code="files_unavailable"
        ) from None


def below_root() -> contextlib.AbstractContextManager[None]:
    """What Redis says of a file may be anybody's word: nothing else than the storage's files is opened."""
    found = settings().gateway_files
    return roots.only((storage.absolute(found),) if found else ())


class FileStorage:
    """What an event loop knows of the storage."""

    def __init__(self) -> None:
        self._checked_at = self._swept_at = float("-inf")

    async def root(self) -> str:
        """Raises `Failure` where there is no storage, or not all share it."""
        found = settings().gateway_files
        if not found:
            raise invalid(None, "this gateway has no storage for files: see PETIOLE_GATEWAY_FILES", "no_storage")
        root = storage.absolute(found)
        if time.monotonic() - self._checked_at > KNOWN_FOR_S:
            await self._check(root)
            self._checked_at = time.monotonic()
        return root

    async def _check(self, root: str) -> None:
        """One gateway writes the marker, and the others wait for it."""
        marker = storage.joined(root, _MARKER)
        key = gateway_key(f"/files/{hashlib.sha256(root.encode()).hexdigest()[:16]}")
        client, mine = connections.async_streams(), secrets.token_hex(16).encode()

        async def known_there() -> bytes:
            raw = await patiently(lambda: client.get(key))
            return raw if isinstance(raw, bytes) else b""

        async def claimed() -> bool:
            return bool(await patiently(lambda: client.set(key, mine, nx=True, ex=_MARKED_WITHIN_S)))

        for _ in range(_TRIES):
            here = await blocking(lambda: storage.read(marker) if storage.size(marker) is not None else b"")
            known = await known_there()
            if here:
                break
            if not known and await claimed():
                await blocking(lambda: storage.write(marker, mine))
                here = known = mine
                break
            await asyncio.sleep(_PAUSE_S)
        if here and not known:
            await patiently(lambda: client.set(key, here, nx=True, ex=_REMEMBERED_S))
            known = await known_there()
        if not here or here != known:
            message = (
                f"PETIOLE_GATEWAY_FILES: must be one folder that all gateways share; {root} is another one here"
            )
            raise Failure(503, message, code="storage_not_shared")
        await patiently(lambda: client.expire(key, _REMEMBERED_S))

    async def sweep(self, root: str) -> None:
        """Remove files, and pages of batches, whose time is over. Their names say when that is, so nobody has to
        remember them."""
        if time.monotonic() - self._swept_at < SWEPT_EVERY_S:
            return
        self._swept_at = time.monotonic()
        await blocking(lambda: remove_expired(root))


def file_at(root: str, name: str, expires_at: int) -> str:
    return storage.joined(root, f"{name}.{expires_at}")


def remove_expired(root: str) -> None:
    now = time.time()
    for name in storage.names(root):
        _, dot, ends = name.removesuffix(segments.PAGES).rpartition(".")
        if not dot or not ends.isdecimal() or int(ends) >= now:
            continue
        if name.endswith(segments.PAGES):
            storage.remove_folder(storage.joined(root, name))
        else:
            storage.remove(storage.joined(root, name))
    storage.remove_unfinished(root, UNFINISHED_FOR_S)


place = connections.PerLoop(FileStorage)
"""The running event loop's."""
