"""`petiole serve` as a process of its own.

with Gateway(folder, PETIOLE_BROKER_URL=site.url) as gateway:
    client = openai.OpenAI(base_url=gateway.url, api_key="none")
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support import nursery
from tests.support.site import PATIENCE_S, REPOSITORY, eventually


class Gateway:
    """A gateway on a free port, of 127.0.0.1 unless told otherwise."""

    _count = 0

    def __init__(self, folder: Path, host: str = "127.0.0.1", **environment: Any) -> None:
        Gateway._count += 1
        self.log = folder / f"gateway{Gateway._count}.log"
        port = str(environment.get("PETIOLE_GATEWAY_PORT", 0))
        command = ["petiole.tasks.commands.cli", "serve", "--host", host, "--port", port]
        with self.log.open("ab") as log:
            self.process = nursery.start(command, nursery.surroundings(**environment), REPOSITORY, log)

    @cached_property
    def url(self) -> str:
        """Waits until it serves."""
        return str(eventually(self._serving, "the gateway serves"))

    def _serving(self) -> str:
        assert self.process.poll() is None, f"the gateway ended:\n{self.output[-4000:]}"
        found = re.search(r"serving (http://\S+)", self.output)
        return found[1] if found else ""

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
