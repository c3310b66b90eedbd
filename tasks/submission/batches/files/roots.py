"""Which files this code may open: all, or regular files below *roots* alone.

A client opens what its user may open. A worker opens what somebody else's batch names, so it does so in a context
of `only`: there a location is below a root, and no symbolic link below the root is followed. Each folder is opened
in the one before it, so nobody can put a link there between a check and the opening."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import NoReturn
from urllib.parse import unquote

from petiole.tasks.errors import BatchError

SETTING = "PETIOLE_BATCH_FILES"
_LOCAL = ("file", "local")
_CHAIN = "::"
"""In a URL of fsspec's: a file in a file of another system."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)

_roots: ContextVar[tuple[str, ...] | None] = ContextVar("roots", default=None)


class LocationRefused(BatchError):  # noqa: N818
    """A location is below no root, or is no regular file."""


def is_url(location: str) -> bool:
    return "://" in location


@contextlib.contextmanager
def only(roots: Sequence[str]) -> Iterator[None]:
    """A context in which `storage` opens files below these roots alone."""
    before = _roots.set(tuple(roots))
    try:
        yield
    finally:
        _roots.reset(before)


def confined() -> bool:
    return _roots.get() is not None


def check(*locations: str) -> None:
    """Raises `LocationRefused`, which says the line of the setting that is missing."""
    roots = _roots.get()
    if roots is None:
        return
    for location in locations:
        if not _well_formed(location):
            raise LocationRefused(f"{location!r}: must be a path from / on, or a bucket's URL, without .. and ::")
    if missing := [one for one in locations if _root_of(one, roots) is None]:
        line = ",".join(dict.fromkeys(one.rpartition("/")[0] or "/" for one in missing))
        raise LocationRefused(
            f"{missing[0]}: is below no folder or URL of which this worker opens files. If it should be, set "
            f"{SETTING}={line} for the workers, beside what that names"
        )


def _well_formed(location: str) -> bool:
    if "\0" in location or ".." in _parts(location):
        return False
    if is_url(location):
        return _CHAIN not in location and location.partition("://")[0].lower() not in _LOCAL
    return location.startswith("/")


def _root_of(location: str, roots: Sequence[str]) -> str | None:
    return next((root for root in roots if f"{location}/".startswith(root.rstrip("/") + "/")), None)


def _parts(location: str) -> list[str]:
    return (unquote(location) if is_url(location) else location).replace("\\", "/").split("/")


# ------------------------------------------------------------ paths


@contextlib.contextmanager
def place(path: str, make: bool = False) -> Iterator[tuple[int | None, str]]:
    """Where a file is: the open folder, and the file's name in it; without roots None and the path. `make`: make
    the folders that are missing. Raises `OSError`, and `LocationRefused`."""
    roots = _roots.get()
    if roots is None:
        if make:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield None, path
        return
    *folders, name = _below(path, roots)
    if not folders:
        _refuse(path)
    folder = _walked(path, folders, make)
    try:
        yield folder, name
    finally:
        os.close(folder)


def status(path: str) -> os.stat_result:
    """Raises `OSError`, and `LocationRefused`."""
    with place(path) as (folder, name):
        found = os.stat(name, dir_fd=folder, follow_symlinks=folder is None)
        _check_regular(path, folder, found)
        return found


def opened(path: str) -> int:
    """A file descriptor, for reading. Raises `OSError`, and `LocationRefused`."""
    with place(path) as (folder, name):
        if folder is None:
            return os.open(name, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            file = os.open(name, os.O_RDONLY | _NO_LINK | _NO_WAIT, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                _refuse(path)
            raise
        try:
            _check_regular(path, folder, os.fstat(file))
        except BaseException:
            os.close(file)
            raise
        return file


def names(path: str) -> list[str]:
    """The names of all that is in this folder. Raises `OSError`, and `LocationRefused`."""
    roots = _roots.get()
    if roots is None:
        return os.listdir(path)
    folder = _walked(path, _below(path, roots))
    try:
        return os.listdir(folder)
    finally:
        os.close(folder)


def _below(path: str, roots: Sequence[str]) -> list[str]:
    """The root that it is below, and the names from there on."""
    check(path)
    root = _root_of(path, roots)
    assert root is not None
    return [root, *PurePosixPath(path).relative_to(root).parts]


def _walked(path: str, names: Sequence[str], make: bool = False) -> int:
    """An open folder: each of the names in the one before it. The first one is a path."""
    root, *folders = names
    if make:
        Path(root).mkdir(parents=True, exist_ok=True)
    at = os.open(root, os.O_RDONLY | _FOLDER)
    try:
        for name in folders:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=at)
            try:
                below = os.open(name, os.O_RDONLY | _FOLDER | _NO_LINK, dir_fd=at)
            except OSError:
                with contextlib.suppress(OSError):
                    if stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                        _refuse(path)
                raise
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def _check_regular(path: str, folder: int | None, found: os.stat_result) -> None:
    if folder is not None and not stat.S_ISREG(found.st_mode):
        _refuse(path)


def _refuse(path: str) -> NoReturn:
    raise LocationRefused(f"{path}: must be a regular file, and no symbolic link may lead to it")
