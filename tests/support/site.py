"""A whole installation in a folder: a real redis-server, real workers, and a producer that sees what they do.

with Site(tmp_path) as site:
    worker = site.worker()
    result = site.generate("hello", max_tokens=4)
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
from celery import Celery
from celery.result import AsyncResult

import tasks.errors  # noqa: F401 - where a stock app looks for the class of a stored failure
from petiole.tasks.app.configuration import configuration
from petiole.tasks.servers import embedded
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import Settings
from petiole.tasks.wire.keys import stream_keys
from tests.support import nursery

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 90.0
NO_DISKS = {"PETIOLE_BATCH_FILES": "/nowhere", "HF_HUB_CACHE": "/nowhere"}
"""Settings of a worker that needs room on no disk: this machine's own may be nearly full."""
PERSISTENT = ("--save", "", "--appendonly", "yes", "--appendfsync", "everysec")


UNFINISHED = """
local messages = 0
for _, list in ipairs(KEYS) do messages = messages + redis.call('LLEN', list) end
local held = redis.call('KEYS', 'petiole:unacked:*')
for _, hash in ipairs(held) do messages = messages + redis.call('HLEN', hash) end
return messages
"""


def eventually(condition: Callable[[], Any], what: str = "", timeout_s: float = PATIENCE_S) -> Any:
    """Wait until `condition()` is true, and return what it gave."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.01)
    return value


class RedisServer:
    """redis-server on a socket, with append-only persistence so that it can be killed and started again."""

    def __init__(self, folder: Path, *options: str, binary: str | None = None) -> None:
        self.folder, self.options = folder, options
        self.binary = binary or shutil.which("redis-server") or embedded.server_binary()
        self.socket = folder / "r.sock"
        self.start()

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}?virtual_host=0"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        where = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder))
        self.process = subprocess.Popen(
            [self.binary, *where, *PERSISTENT, *self.options], stdout=subprocess.DEVNULL
        )
        eventually(lambda: embedded.answers(self.socket), "redis-server answers")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Stop as an operator would, so that everything acknowledged is on disk, and start again."""
        self.process.terminate()
        self.process.wait()
        self.start()


class Worker:
    """`celery -A tasks worker`, or one of another app, in a process of its own."""

    def __init__(
        self,
        folder: Path,
        name: str,
        environment: dict[str, str],
        *arguments: str,
        app: str = "tasks",
        repository: Path = REPOSITORY,
        python: Path | str = sys.executable,
    ) -> None:
        self.name, self.node, self.arguments = name, f"{name}@test", arguments
        self.log = folder / f"{name}.log"
        command = ["celery", "-A", app, "worker", "-l", "INFO", "-n", self.node, *arguments]
        with self.log.open("ab") as log:
            self.process = nursery.start(command, environment, repository, log, python=python)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self, timeout_s: float = 120.0) -> Worker:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.output[-4000:]}"
            return f"{self.node} ready." in self.output

        eventually(is_ready, f"{self.name} is ready", timeout_s)
        return self

    def memory_bytes(self, name: str = "VmRSS") -> int:
        """Its memory: `VmRSS` now, `VmHWM` the most so far. Only on Linux."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def alive(self) -> bool:
        return self.process.poll() is None

    def stopped(self) -> bool:
        """By SIGSTOP."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """A warm shutdown. Returns the exit status."""
        if self.alive():
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.ended(timeout_s)

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end. Returns the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} does not end:\n{self.output[-4000:]}") from None


class Site:
    """A Redis, workers on it, and a producer."""

    def __init__(
        self,
        folder: Path,
        *,
        binary: str | None = None,
        options: tuple[str, ...] = (),
        server: Any = None,
        **environment: Any,
    ):
        self.folder = folder
        self.server = server or RedisServer(folder, *options, binary=binary)
        self.url = self.server.url
        self.environment = {
            "PETIOLE_ENGINE_FACTORY": "tests.support.fake_engine:FakeEngine",
            "PETIOLE_MAX_NUM_SEQS": "8",
            "PETIOLE_BATCH_FILES": tempfile.gettempdir(),
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in environment.items()},
        }
        self.workers: list[Worker] = []
        self.use(self.url)

    def use(self, url: str) -> None:
        """Have the producer, and the workers that are started from now on, reach Redis by this URL."""
        self.environment["PETIOLE_BROKER_URL"] = url
        self.app = Celery("petiole", set_as_current=False)
        self.app.conf.update(configuration(Settings(broker_url=url)))
        self.redis: redis.Redis = connect(url)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.alive():
                worker.kill()
        self.forget()
        self.app.close()
        self.redis.close()
        self.server.kill()

    def forget(self) -> None:
        """Celery's producer subscribes to each result, and who drops one unsubscribes. Without Redis that takes
        seconds, within a garbage collection of any later test."""
        self.app.backend.result_consumer.subscribed_to.clear()

    # ------------------------------------------------------------ workers

    def start_worker(
        self,
        *arguments: str,
        gossip: bool = False,
        app: str = "tasks",
        repository: Path = REPOSITORY,
        python: Path | str = sys.executable,
        **environment: Any,
    ) -> Worker:
        """`repository`: a folder with another version; `python`: the interpreter of another environment."""
        earlier = [] if repository == REPOSITORY else [str(repository / "tests")]  # imported `support`
        paths = [str(repository), *earlier, os.environ.get("PYTHONPATH", "")]
        full = {
            **os.environ,
            **self.environment,
            **{name: str(value) for name, value in environment.items()},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
        }
        alone = () if gossip else ("--without-gossip", "--without-mingle")
        name = f"w{len(self.workers)}"
        worker = Worker(self.folder, name, full, *alone, *arguments, app=app, repository=repository, python=python)
        self.workers.append(worker)
        return worker

    def worker(self, *arguments: str, **options: Any) -> Worker:
        return self.start_worker(*arguments, **options).ready()

    # ------------------------------------------------------------ tasks

    def signature(self, prompt: Any = "hello", **options: Any) -> Any:
        return self.app.signature("tasks.generate", kwargs={"prompt": prompt, **options})

    def generate(
        self, prompt: Any = "hello", *, submission: dict[str, Any] | None = None, **options: Any
    ) -> AsyncResult:
        kwargs = {"prompt": prompt, **options}
        return self.app.send_task("tasks.generate", kwargs=kwargs, **(submission or {}))

    def get(self, result: AsyncResult, timeout_s: float = PATIENCE_S) -> Any:
        return result.get(timeout=timeout_s)

    # ------------------------------------------------------------ what Redis holds

    def log(self, task: AsyncResult | str) -> list[dict[str, Any]]:
        key = stream_keys(task if isinstance(task, str) else task.id).log
        return [json.loads(entry) for entry in self.redis.lrange(key, 0, -1)]

    def state(self, task: AsyncResult | str) -> dict[str, str]:
        key = stream_keys(task if isinstance(task, str) else task.id).state
        return {name.decode(): value.decode() for name, value in self.redis.hgetall(key).items()}

    def cancelled(self, task: AsyncResult | str) -> bool:
        """Whether the cancel flag is set."""
        return bool(self.redis.hexists(stream_keys(task if isinstance(task, str) else task.id).asked, "cancel"))

    def tokens(self, task: AsyncResult | str) -> list[int]:
        """All tokens in the log; asserts that each delta begins where the one before ends."""
        tokens: list[int] = []
        for delta in self.log(task):
            assert delta["index"] == len(tokens), f"a gap or an overlap at {delta['index']}"
            tokens += delta["token_ids"]
        return tokens

    def streaming(self, task: AsyncResult | str, at_least: int = 1) -> list[dict[str, Any]]:
        """Wait until so many tokens are in the log."""
        eventually(lambda: len(self.tokens(task)) >= at_least, f"{at_least} tokens of {task}")
        return self.log(task)

    def deltas(
        self, task: AsyncResult | str, timeout_s: float = PATIENCE_S
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """Follow a log from its beginning: (when it was seen, delta), to the last one."""
        seen, deadline = 0, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for delta in self.log(task)[seen:]:
                seen += 1
                yield time.monotonic(), delta
                if delta["finish_reason"] is not None:
                    return
            time.sleep(0.01)
        raise AssertionError(f"no end of stream {task} within {timeout_s} s")

    @property
    def queues(self) -> list[str]:
        """The lists of the default queue, one a priority."""
        queue = str(self.app.conf.task_default_queue)
        return [queue, *(f"{queue}\x06\x16{step}" for step in (3, 6, 9))]

    def queued(self) -> int:
        return sum(map(self.redis.llen, self.queues))

    def unfinished(self, *more_queues: str) -> int:
        """Messages in queues and in workers' hands, counted in one instant: they go to and fro."""
        return int(self.redis.eval(UNFINISHED, len(keys := [*self.queues, *more_queues]), *keys))

    def holder(self) -> Worker:
        """The worker that holds messages; its process is part of its owner's name."""
        owners = eventually(lambda: self.redis.keys("petiole:unacked:*"), "somebody holds a message")
        process = int(owners[0].decode().split(":")[3])
        return next(worker for worker in self.workers if worker.process.pid == process)

    def held(self) -> int:
        """Messages that some worker holds."""
        return sum(self.redis.hlen(key) for key in self.redis.keys("petiole:unacked:*"))

    def without_ttl(self) -> set[str]:
        """Keys that would stay for ever, but for kombu's bindings."""
        keys = {key.decode() for key in self.redis.keys("*") if self.redis.ttl(key) == -1}
        return {key for key in keys if not key.startswith("_kombu")}
