"""One redis-server for all processes of a user, and none when they are gone, however they went."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from petiole.tasks.servers import embedded
from petiole.tasks.servers._supervisor import GRACE_S
from petiole.tasks.servers.embedded import EmbeddedRedisError
from tests.support.site import eventually

USER = """
import sys
from petiole.tasks.servers import embedded
print(embedded.socket_path(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A short path: pytest's own would be too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        yield Path(folder)
        eventually(lambda: not processes(Path(folder)), "the server has ended")


class User:
    """A process that uses the server until it is told to end, or killed."""

    def __init__(self, base: Path, code: str = USER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(base)},
        )

    @property
    def socket(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leave(self) -> None:
        self.process.communicate()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def processes(base: Path) -> dict[int, str]:
    """Supervisors and servers of `base`, by process id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(base) in command and ("_supervisor" in command or "redis-server" in command):
            found[int(entry.name)] = command
    return found


def server_pid(base: Path) -> int:
    (pid,) = (pid for pid, command in processes(base).items() if "_supervisor" not in command)
    return pid


def supervisor_pid(base: Path) -> int:
    (pid,) = (pid for pid, command in processes(base).items() if "_supervisor" in command)
    return pid


def test_all_processes_find_the_same_server(base: Path) -> None:
    first, second = User(base), User(base)
    assert first.socket == second.socket == str(base / f"petiole-{os.getuid()}" / "redis.sock")
    assert len(processes(base)) == 2
    first.leave()
    second.leave()


def test_many_that_start_at_once_start_one(base: Path) -> None:
    users = [User(base) for _ in range(6)]
    assert len({user.socket for user in users}) == 1
    assert len(processes(base)) == 2
    for user in users:
        user.kill()


def test_the_server_stays_while_anyone_uses_it_and_leaves_nothing(base: Path) -> None:
    first, second = User(base), User(base)
    path, _ = first.socket, second.socket
    server = server_pid(base)
    first.leave()
    third = User(base)
    assert third.socket == path
    second.kill()
    assert server_pid(base) == server
    third.kill()
    eventually(lambda: not list(base.iterdir()), "folder and server are gone")


def test_only_the_servers_own_files_are_removed(base: Path) -> None:
    """Something else has put its files into the folder, a subfolder among them."""
    user = User(base)
    folder = Path(user.socket).parent
    (folder / "theirs").mkdir()
    (folder / "theirs" / "kept").touch()
    (folder / "native-1.so").touch()
    assert redis.Redis(unix_socket_path=str(folder / "redis.sock")).save()
    user.leave()
    eventually(lambda: not processes(base), "the server has ended")
    assert sorted(path.name for path in folder.iterdir()) == ["native-1.so", "theirs"]
    assert (folder / "theirs" / "kept").exists()
    other = User(base)
    assert redis.Redis(unix_socket_path=other.socket).ping()
    other.leave()


def test_a_killed_supervisor_takes_the_server_with_it_and_the_next_user_starts_both(base: Path) -> None:
    user = User(base)
    path = user.socket
    os.kill(supervisor_pid(base), signal.SIGKILL)
    eventually(lambda: not processes(base), "the server has died with its supervisor")
    other = User(base)
    assert other.socket == path
    assert redis.Redis(unix_socket_path=path).ping()
    user.leave()
    other.leave()


def test_a_killed_server_is_started_anew_by_the_next_user(base: Path) -> None:
    user = User(base)
    path = user.socket
    os.kill(server_pid(base), signal.SIGKILL)
    eventually(lambda: not processes(base), "the supervisor has followed its server")
    other = User(base)
    assert redis.Redis(unix_socket_path=other.socket).ping()
    assert path
    user.kill()
    other.kill()


def test_users_that_come_and_go_always_find_a_server(base: Path) -> None:
    """Some of them meet the supervisor just when it is about to stop."""
    for _ in range(8):
        user = User(base)
        assert redis.Redis(unix_socket_path=user.socket).ping()
        user.kill()
        eventually(lambda: not processes(base), "stopped") if _ % 2 else None


def test_a_forked_child_is_a_user(base: Path) -> None:
    code = """
import os, sys
from petiole.tasks.servers import embedded
path = embedded.socket_path()
if os.fork():
    os._exit(0)
assert embedded.socket_path() == path
print(path, flush=True)
sys.stdin.read()
"""
    user = User(base, code)
    path = user.socket
    server = server_pid(base)
    assert embedded.answers(Path(path))
    user.process.wait()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        # Longer than the grace for which a server waits for its next user: the connection stays open.
        assert select.select([client], [], [], 2 * GRACE_S) == ([], [], [])
    assert server_pid(base) == server
    user.leave()


def test_a_program_that_a_user_starts_is_none(base: Path) -> None:
    code = """
import subprocess, sys
from petiole.tasks.servers import embedded
path = embedded.socket_path()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdout=subprocess.DEVNULL)
print(path, child.pid, flush=True)
"""
    user = User(base, code)
    child = int(user.socket.split()[1])
    user.process.wait()
    eventually(lambda: not processes(base), "the server has ended")
    os.kill(child, 0)
    user.leave()


def test_a_folder_that_others_can_read_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    (base / f"petiole-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(EmbeddedRedisError, match="only you can read"):
        embedded.socket_path()


def test_a_path_too_long_for_a_socket_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert not str(embedded.runtime_folder()).startswith(str(deep))


def test_a_server_that_cannot_start_says_why(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    broken = base / "redis-server"
    broken.write_text("#!/bin/sh\necho no memory at all >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "server_binary", lambda: str(broken))
    with pytest.raises(EmbeddedRedisError, match="no memory at all"):
        embedded.socket_path()


def test_no_server_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match="pip install"):
        embedded.server_binary()
