"""Runs one embedded redis-server for as long as any process uses it. Run as a script: see `embedded`.

    python _supervisor.py FOLDER REDIS_SERVER READY_FD

It imports only the standard library, because the first `delay()` waits for it to start.
Every user process holds a shared lock on FOLDER/users; the kernel releases it when the process ends, even by
SIGKILL. This process waits for the exclusive lock, which is granted once there are no users. On Linux the kernel
kills the server when this process dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

GRACE_S = 1.0  # consecutive commands reuse the same server
FILES = ("users", "redis.sock", "redis.log", "supervisor.log", "dump.rdb")
"""The files that the server, its supervisor and its users make in their folder, beside `lock` (SAVE makes
`dump.rdb`)."""
_PR_SET_PDEATHSIG = 1


def main(folder: Path, server: str, ready_fd: int) -> None:
    if os.fork():  # daemonize: no user process has to reap it
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the user processes
    signal.signal(signal.SIGCHLD, lambda *_: sys.exit("redis-server ended"))
    redis = start(folder, server)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # the kernel then kills the server (Linux)
    wait_until_it_answers(folder / "redis.sock")
    os.write(ready_fd, b"ready")
    os.close(ready_fd)

    users = os.open(folder / "users", os.O_RDWR | os.O_CLOEXEC)
    starting = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(GRACE_S)
        fcntl.flock(starting, fcntl.LOCK_EX)  # no process can become a user from here on
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            fcntl.flock(starting, fcntl.LOCK_UN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    redis.terminate()
    redis.wait()
    remove(folder)


def remove(folder: Path) -> None:
    """Delete the server's files, and `folder` if it is then empty. `lock` goes last: a process that acquires or
    recreates the lock must not see files of the old server."""
    for name in (*FILES, "lock"):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process is using the folder again, or somebody's file lies there
        folder.rmdir()


def start(folder: Path, server: str) -> subprocess.Popen[bytes]:
    sock = folder / "redis.sock"
    sock.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(sock),
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(folder / "redis.log"),
        "loglevel": "warning",
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    return subprocess.Popen([server, *arguments], stdin=subprocess.DEVNULL, preexec_fn=die_with(os.getpid()))


def die_with(parent: int) -> Callable[[], None] | None:
    """A `preexec_fn` that makes Linux kill the child when `parent` dies; elsewhere None."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def wait_until_it_answers(path: Path) -> None:
    """The SIGCHLD handler exits this process if the server cannot start."""
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"PING\r\n")
                if client.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
