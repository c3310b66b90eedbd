"""Processes of `make test` and `make trials` that need not import their libraries: a process that has them forks
for each.

Importing torch and Celery is most of what a worker's start costs. A forked process has imported nothing that
reads a setting, and runs the module with the arguments, environment, folder and output of the command itself.
`start` runs the command itself in other runs of the tests, and with an environment that imports may read.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import IO

from tests.support import trials

LIBRARIES = (
    "torch",
    "safetensors.torch",
    "tokenizers",
    "redis.asyncio",
    "redis.sentinel",
    "pydantic_settings",
    "celery.bin.celery",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.fixups.django",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.control",
    "kombu.transport.redis",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "starlette.routing",
    "msgspec",
    "prometheus_client",
    "petiole.gpu_worker.engine",
)
"""What a worker or a gateway imports and what reads none of Petiole's settings meanwhile."""
REPOSITORY = Path(__file__).resolve().parents[2]
READ_LATE = ("PETIOLE_", "PYTEST_", "PYTHONWARNINGS", "SHOP_", "DOOM", "CUTTING_", "FALLS")
"""How the names of variables begin that no library reads when it is imported."""
LARGEST = 2**17
MOST = 2
"""How many environments have a nursery: the first order's may be a rare one."""


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """What may matter to an import."""
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}


class Forked:
    """A process of the nursery's, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        self._lock = Lock()
        self.pid = int(told.recv(LARGEST))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self._told.settimeout(timeout)
                try:
                    self.returncode = int(self._told.recv(LARGEST))
                except (TimeoutError, BlockingIOError):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
                self._told.close()
            return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks. It ends with the one that has this object."""

    def __init__(self, environment: Mapping[str, str], folder: Path, libraries: Sequence[str] = LIBRARIES) -> None:
        self.early, self.folder, self.libraries = early(environment), folder, libraries
        self._lock = Lock()

    def suits(self, environment: Mapping[str, str]) -> bool:
        return early(environment) == self.early

    @cached_property
    def _orders(self) -> socket.socket:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno()), *self.libraries],
                cwd=self.folder,
                env={
                    **self.early,
                    "GOMP_SPINCOUNT": "100",
                },  # as petiole.gpu_worker sets it before it imports torch
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        return ours

    def close(self) -> None:
        self._orders.close()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        output: IO[bytes],
        errors: IO[bytes] | None = None,
    ) -> Forked:
        """`python -m ARGUMENTS`. errors: where they go if not to `output`."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps([list(arguments), dict(environment), str(folder)]).encode()
        with self._lock, its:
            handed = [output.fileno(), (errors or output).fileno(), its.fileno()]
            socket.send_fds(self._orders, [order], handed)
        return Forked(ours)


_nurseries: list[Nursery] = []


def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    output: IO[bytes],
    errors: IO[bytes] | None = None,
    python: Path | str = sys.executable,
) -> Forked | subprocess.Popen[bytes]:
    """`python -m ARGUMENTS`: forked in `make test` and `make trials`. errors: where they go if not to `output`."""
    if trials.forks and str(python) == sys.executable and hasattr(os, "pidfd_open"):
        suitable = [nursery for nursery in _nurseries if nursery.suits(environment)]
        if not suitable and len(_nurseries) < MOST:
            suitable = [Nursery(environment, folder)]
            _nurseries.extend(suitable)
        if suitable:
            return suitable[0].start(arguments, environment, folder, output, errors)
    return subprocess.Popen(
        [str(python), "-m", *arguments],
        cwd=folder,
        env=environment,
        stdout=output,
        stderr=errors or subprocess.STDOUT,
    )


def surroundings(**environment: object) -> dict[str, str]:
    """This process's environment and `environment`, for a process that imports Petiole from this checkout."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in environment.items()},
    }


def petiole(*arguments: str, folder: Path = REPOSITORY, **environment: object) -> subprocess.CompletedProcess[str]:
    """`petiole ARGUMENTS`."""
    return run("petiole.tasks.commands.cli", *arguments, folder=folder, **environment)


def run(*words: str, folder: Path = REPOSITORY, **environment: object) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS`, to its end."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        status = start(words, surroundings(**environment), folder, output, errors).wait()
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode())
    return subprocess.CompletedProcess(words, status, *said)


def main(orders: socket.socket, libraries: Sequence[str]) -> None:
    """Fork for each order, and tell how each process ended; in a forked process, be what was ordered."""
    for name in libraries:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is orders:
                order, [*handed], _, _ = socket.recv_fds(orders, LARGEST, 3)
                if not order:
                    return
                told = socket.socket(fileno=handed.pop())
                if (pid := os.fork()) == 0:
                    selector.close()
                    for one in (orders, told, *(other for _, other in children.values())):
                        one.close()
                    for descriptor in children:
                        os.close(descriptor)
                    become(*json.loads(order), handed)
                    return
                for descriptor in handed:
                    os.close(descriptor)
                told.send(str(pid).encode())
                children[watch := os.pidfd_open(pid)] = pid, told
                selector.register(watch, selectors.EVENT_READ)
            else:
                selector.unregister(key.fd)
                os.close(key.fd)
                pid, told = children.pop(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError), told:
                    told.send(str(status).encode())


def become(arguments: list[str], environment: dict[str, str], folder: str, outputs: list[int]) -> None:
    """`python -m ARGUMENTS`, in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, descriptor)
        os.close(output)
    os.chdir(folder)
    sys.path[0] = folder
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    for name in ("numpy.random", "torch"):  # as after an import; a hash's seed is the nursery's
        if name in sys.modules:
            sys.modules[name].seed()
    sys.argv = list(arguments)
    sys.orig_argv = [sys.executable, "-m", *arguments]
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
