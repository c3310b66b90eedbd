"""Files by their location: a path, or a URL such as `s3://bucket/rows.jsonl`, which fsspec reads and writes.

A file appears whole or not at all, and is on disk when it appears. What cannot be read or written raises
`StorageError`, which names the location; what must not be, `roots.LocationRefused`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from petiole.tasks.errors import BatchError, PetioleError
from petiole.tasks.submission.batches.files import roots
from petiole.tasks.submission.batches.files.roots import is_url as is_url

_UNFINISHED = ".unfinished"
_BLOCK = 2**20


class StorageError(BatchError):
    """A file cannot be read or written now. Another try, or another machine, may succeed."""


def joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def absolute(location: str) -> str:
    """The location as any process on this machine understands it."""
    return location if is_url(location) else os.path.abspath(location)


@contextlib.contextmanager
def named(location: str, more: str = "") -> Iterator[None]:
    """A context in which an error of the system becomes a `StorageError` about this file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{location}: {error.strerror or error}{more}") from error


@contextlib.contextmanager
def reached(location: str) -> Iterator[None]:
    """`named`, for what only this file's system does: a bucket's driver has errors of its own for it."""
    try:
        with named(location):
            yield
    except PetioleError:
        raise
    except Exception as error:
        if not is_url(location):
            raise
        raise StorageError(f"{location}: {type(error).__name__}: {error}") from error


def writing(location: str) -> contextlib.AbstractContextManager[None]:
    return named(location, ". What is written stays; the same batch goes on")


def opened(location: str) -> IO[bytes]:
    """For reading, from its beginning. `-`: standard input."""
    if location == "-":
        roots.check(location)
        return sys.stdin.buffer
    with reached(location):
        if not is_url(location):
            return open(roots.opened(location), "rb")
        system, path = _system(location)
        return io.BufferedReader(system.open(path, "rb"), _BLOCK)  # a bucket's file cannot read a part of a line


def read(location: str) -> bytes:
    with reached(location), opened(location) as file:
        return file.read()


def size(location: str) -> int | None:
    """In bytes. None: there is no such file."""
    with reached(location):
        try:
            if not is_url(location):
                return roots.status(location).st_size
            system, path = _system(location)
            return int(system.size(path))
        except FileNotFoundError:
            return None


def names(folder: str) -> list[str]:
    """The names of the finished files in this folder, in order. A folder that does not exist has none."""
    return sorted(name for name in _all_names(folder) if name and not name.endswith(_UNFINISHED))


def _all_names(folder: str) -> list[str]:
    with reached(folder):
        try:
            if not is_url(folder):
                return roots.names(folder)
            system, path = _system(folder)
            system.invalidate_cache()
            return [str(one).rpartition("/")[2] for one in system.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []


@contextlib.contextmanager
def written(location: str) -> Iterator[IO[bytes]]:
    """A file to write. It appears, in place of an older one, when the context ends without an error."""
    with writing(location), _of_url(location) if is_url(location) else _of_path(location) as file:
        yield file


def write(location: str, data: bytes) -> None:
    with written(location) as file:
        file.write(data)


def remove(location: str) -> None:
    """A file that does not exist is no error."""
    with reached(location), contextlib.suppress(FileNotFoundError):
        if is_url(location):
            system, path = _system(location)
            system.rm_file(path)
            return
        with roots.place(location) as (folder, name):
            os.unlink(name, dir_fd=folder)


def remove_folder(folder: str) -> None:
    """With the files in it."""
    for name in _all_names(folder):
        remove(joined(folder, name))
    if not is_url(folder):
        with contextlib.suppress(OSError), roots.place(folder) as (parent, name):
            os.rmdir(name, dir_fd=parent)


def remove_unfinished(folder: str, after_s: float) -> None:
    """Remove what processes have left that died while they wrote, this long ago. A bucket has no such files."""
    if is_url(folder):
        return
    with named(folder):
        for left in (joined(folder, name) for name in _all_names(folder) if name.endswith(_UNFINISHED)):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - roots.status(left).st_mtime > after_s:
                    remove(left)


@contextlib.contextmanager
def _of_path(path: str) -> Iterator[IO[bytes]]:
    with roots.place(path, make=True) as (folder, name):
        made = f"{name}.{os.urandom(6).hex()}{_UNFINISHED}"  # containers share process ids
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            with open(os.open(made, flags, 0o666, dir_fd=folder), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(made, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made, dir_fd=folder)
            raise
        with contextlib.suppress(OSError):
            _sync_folder(folder, name)


def _sync_folder(folder: int | None, name: str) -> None:
    """Let a name in it outlive a power cut, where the system can say so."""
    if folder is not None:
        os.fsync(folder)
        return
    opened = os.open(Path(name).parent, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextlib.contextmanager
def _of_url(location: str) -> Iterator[IO[bytes]]:
    system, path = _system(location)
    with contextlib.suppress(OSError, NotImplementedError):  # buckets have no folders
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
    with reached(location):
        file: Any = system.open(path, "wb", autocommit=False)
    buffered = io.BufferedWriter(_Unclosed(location, file), _BLOCK)
    try:
        yield buffered
        buffered.flush()
        with reached(location):
            file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        raise
    with reached(location):
        file.commit()


class _Unclosed(io.RawIOBase):
    """A file that only its owner closes."""

    def __init__(self, location: str, file: Any) -> None:
        self._location, self._file = location, file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with reached(self._location):
            self._file.write(bytes(data))
        return len(data)


def _system(location: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises `roots.LocationRefused`."""
    roots.check(location)
    web = location.startswith(("http://", "https://"))
    stays = {"allow_redirects": False} if web and roots.confined() else {}
    try:
        import fsspec  # type: ignore[import-untyped]

        system, path = fsspec.core.url_to_fs(location, **stays)
    except (ImportError, ValueError) as error:
        raise StorageError(f"{location}: needs fsspec and its driver, as in 'petiole[s3]' ({error})") from None
    return system, str(path)
