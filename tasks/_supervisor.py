"""Keeps one embedded redis-server for as long as a process uses it. Run as a script: see `tasks.embedded`.

    python _supervisor.py FOLDER REDIS_SERVER READY_FD

It imports nothing but the standard library, because it lies on the path of a first `delay()`.
Users hold a shared lock on FOLDER/users, which the kernel drops when they die, however they die. This process
asks for the exclusive lock: to get it is to know that nobody is left. The server dies with this process.
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

GRACE_S = 1.0  # so that commands that follow one another find the same server
_PR_SET_PDEATHSIG = 1


def main(folder: Path, server: str, ready_fd: int) -> None:
    if os.fork():  # nobody's child: no user has to wait for it
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the users
    signal.signal(signal.SIGCHLD, lambda *_: sys.exit("redis-server ended"))
    redis = start(folder, server)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the kernel stops the server
    wait_until_it_answers(folder / "redis.sock")
    os.write(ready_fd, b"ready")
    os.close(ready_fd)

    users = os.open(folder / "users", os.O_RDWR | os.O_CLOEXEC)
    starting = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(GRACE_S)
        fcntl.flock(starting, fcntl.LOCK_EX)  # from here on nobody can become a user
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
    """`lock` goes last: whoever waits for it, or makes it anew, must not find anything of the old server."""
    for path in folder.iterdir():
        if path.name != "lock":
            path.unlink(missing_ok=True)
    (folder / "lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has begun anew in here
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
    """Where the kernel can (Linux), the server is killed when this process dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


def wait_until_it_answers(path: Path) -> None:
    """The SIGCHLD handler ends the wait when the server cannot start."""
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
