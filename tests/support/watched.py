"""A Redis that is watched: a master, replicas, and three sentinels that agree on who is the master.

with Site(tmp_path, server=Watched(tmp_path / "redis")) as site:
    site.server.fail_over()
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import redis

from petiole.tasks.servers import embedded
from tests.support.certificates import Certificates
from tests.support.site import RedisServer, eventually

SENTINELS = 3
DOWN_AFTER_MS = 1500
"""Without an answer for so long a master is down: a busy machine must not look like a dead Redis."""

PASSWORD, SENTINEL_PASSWORD = "m@ster/p:ss", "s&ntinel"


def free_ports(count: int) -> list[int]:
    """Below those that connections take for themselves."""
    candidates, found = random.sample(range(20_000, 32_000), 1000), []
    while len(found) < count:
        with suppress(OSError), closing(socket.create_server(("127.0.0.1", port := candidates.pop()))):
            found.append(port)
    return found


class Watched:
    """`servers[0]` begins as the master. `options` are every server's. `tls` for all, and for nothing else."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        replicas: int = 1,
        name: str = "mymaster",
        binary: str | None = None,
        tls: Certificates | None = None,
    ) -> None:
        self.folder, self.name, self.tls = folder, name, tls
        self.binary = binary or shutil.which("redis-server") or embedded.server_binary()
        self.ports = free_ports(1 + replicas + SENTINELS)
        self.server_ports, self.sentinel_ports = self.ports[:-SENTINELS], self.ports[-SENTINELS:]
        self.servers: list[RedisServer] = []
        self.sentinels: list[subprocess.Popen[bytes]] = []
        try:
            self._start_servers(options)
            self.sentinels += map(self._sentinel, range(SENTINELS))
            eventually(lambda: all(map(self._knows_all, self.sentinel_ports)), "the sentinels know all")
        except BaseException:
            self.kill()
            raise

    def _start_servers(self, options: tuple[str, ...]) -> None:
        for number, port in enumerate(self.server_ports):
            folder = self.folder / f"r{number}"
            folder.mkdir(parents=True)
            quick = ("--repl-diskless-sync-delay", "0")
            server = RedisServer(folder, *self._listens(port), *quick, *options, binary=self.binary)
            self.servers.append(server)
            with redis.Redis(unix_socket_path=str(server.socket)) as open_to_all:
                if number:
                    open_to_all.replicaof("127.0.0.1", self.server_ports[0])
                open_to_all.config_set("masterauth", PASSWORD)
                open_to_all.config_set("requirepass", PASSWORD)
        eventually(self.in_step, "replicas are in step")

    def kill(self) -> None:
        for process in self.sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.kill()

    @property
    def url(self) -> str:
        """As an operator would write it: what is the master's is said once."""
        first, *others = (f"127.0.0.1:{port}" for port in self.sentinel_ports)
        others = [f"sentinel://{other}" for other in others]
        tls = f"?{urlencode(self.tls.client)}" if self.tls else ""
        return ";".join([f"sentinel://:{quote(PASSWORD, safe='')}@{first}", *others]) + "/0" + tls

    # ------------------------------------------------------------ what happens to it

    def fail_over(self) -> None:
        """As planned by an operator."""
        self.ask(self.sentinel_ports[-1], "SENTINEL", "FAILOVER", self.name)

    def bring_back(self, server: RedisServer) -> None:
        """A server that was killed returns, and follows the master."""
        port = self.server_ports[self.servers.index(self.master())]
        server.start()
        with redis.Redis(unix_socket_path=str(server.socket)) as open_to_all:
            open_to_all.replicaof("127.0.0.1", port)
            open_to_all.config_set("masterauth", PASSWORD)
            open_to_all.config_set("requirepass", PASSWORD)

    def kill_sentinel(self, number: int) -> None:
        self.sentinels[number].kill()
        self.sentinels[number].wait()

    def start_sentinel(self, number: int) -> None:
        self.sentinels[number] = self._start(number)

    # ------------------------------------------------------------ what it says

    def client(self, server: RedisServer) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(server.socket), password=PASSWORD)

    def master(self) -> RedisServer:
        """The server that the first sentinel that lives calls the master."""
        for port in self.sentinel_ports:
            with suppress(redis.ConnectionError):
                return self.servers[self.server_ports.index(int(self._state(port)["port"]))]
        raise AssertionError("no sentinel lives")

    def role(self, server: RedisServer) -> str:
        return str(self.client(server).info("replication")["role"])

    def in_step(self) -> bool:
        """Has every replica all that its master has now?"""
        states = [self.client(server).info("replication") for server in self.servers]
        replicas = [state for state in states if state["role"] == "slave"]
        if len(replicas) != len(states) - 1:
            return False
        sent = next(state["master_repl_offset"] for state in states if state not in replicas)
        return all(one["master_link_status"] == "up" and one["slave_repl_offset"] >= sent for one in replicas)

    def ask(self, port: int, *command: str) -> Any:
        tls: dict[str, Any] = {"ssl": True, **self.tls.client} if self.tls else {}
        with redis.Redis(port=port, password=SENTINEL_PASSWORD, retry=None, protocol=2, **tls) as sentinel:
            return sentinel.execute_command(*command)

    def _state(self, port: int) -> dict[str, Any]:
        return dict(self.ask(port, "SENTINEL MASTER", self.name))

    def _knows_all(self, port: int) -> bool:
        number = self.sentinel_ports.index(port)
        assert self.sentinels[number].poll() is None, (self.folder / f"s{number}.log").read_text()
        with suppress(redis.ConnectionError):
            state = self._state(port)
            others, replicas = int(state["num-other-sentinels"]), int(state["num-slaves"])
            return others == SENTINELS - 1 and replicas == len(self.servers) - 1 and state["flags"] == "master"
        return False

    def _sentinel(self, number: int) -> subprocess.Popen[bytes]:
        master = f"sentinel monitor {self.name} 127.0.0.1 {self.server_ports[0]} 2"
        (self.folder / f"s{number}.conf").write_text(
            f"""
bind 127.0.0.1
dir "{self.folder}"
logfile "{self.folder}/s{number}.log"
requirepass "{SENTINEL_PASSWORD}"
sentinel sentinel-pass "{SENTINEL_PASSWORD}"
{master}
sentinel auth-pass {self.name} "{PASSWORD}"
sentinel down-after-milliseconds {self.name} {DOWN_AFTER_MS}
sentinel failover-timeout {self.name} 5000
"""
        )
        return self._start(number)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                self.binary,
                str(self.folder / f"s{number}.conf"),
                "--sentinel",
                *self._listens(self.sentinel_ports[number]),
            ],
            stdout=subprocess.DEVNULL,
        )

    def _listens(self, port: int) -> tuple[str, ...]:
        if self.tls is None:
            return "--port", str(port)
        return "--port", "0", "--tls-port", str(port), "--tls-replication", "yes", *self.tls.server
