"""A RabbitMQ of a test's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from petiole.tasks.app.application import App
from petiole.tasks.app.configuration import configuration
from petiole.tasks.settings import Settings
from tests.support.site import Site, eventually

BINARY = shutil.which("rabbitmq-server") or "/usr/lib/rabbitmq/bin/rabbitmq-server"
INSTALLED = Path(BINARY).exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RabbitServer:
    """rabbitmq-server with data of its own, which can be stopped and started again."""

    def __init__(self, folder: Path, options: str = "") -> None:
        """`options`: such as `-rabbit consumer_timeout 1000`."""
        self.folder, self.port, self.epmd = folder, free_port(), free_port()
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "RABBITMQ_NODENAME": f"petiole{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_PID_FILE": str(folder / "pid"),
            "ERL_EPMD_PORT": str(self.epmd),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"+S 1:1 {options}",
        }
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self.start()

    def start(self) -> None:
        binary = "/usr/lib/rabbitmq/bin/rabbitmq-server"
        with (self.folder / "out").open("wb") as output:
            self.process = subprocess.Popen(
                [binary if Path(binary).exists() else BINARY],
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def listens() -> bool:
            assert self.process.poll() is None, (self.folder / "out").read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        eventually(listens, "rabbitmq-server listens", 180.0)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def close(self) -> None:
        self.stop()
        command = ["epmd", "-port", str(self.epmd), "-kill"]
        subprocess.run(command, env=self.environment, capture_output=True, check=False)


@contextmanager
def site_on(server: RabbitServer, folder: Path, **environment: Any) -> Iterator[Site]:
    """A site whose messages are in RabbitMQ, and all else in a Redis."""
    with Site(folder, **environment) as site:
        site.environment |= {"PETIOLE_BROKER_URL": server.url, "PETIOLE_REDIS_URL": site.url}
        site.app = App("petiole", set_as_current=False)
        site.app.conf.update(configuration(Settings(broker_url=server.url, redis_url=site.url)))
        yield site
