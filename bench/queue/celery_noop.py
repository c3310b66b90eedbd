"""One-token generations through the whole worker, beside a no-op task on Celery's own `threads` pool.

Both workers run in turn on the same embedded Redis, with the same producer. The difference is the cost of
Petiole's pool, transport and streams for a task.

    python -m bench.queue.celery_noop [--quick] [--json PATH]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery

from bench.harness.report import Report, arguments
from petiole.tasks.app.configuration import configuration
from petiole.tasks.commands.demos.demo import python_path
from petiole.tasks.servers import embedded
from petiole.tasks.settings import Settings

TARGET = 0.8
NOOP = """
from celery import Celery
from petiole.tasks.app.configuration import configuration
from petiole.tasks.settings import settings
app = Celery("noop", set_as_current=False)
app.conf.update({**configuration(settings()), "worker_pool": "threads"})
@app.task(name="noop")
def noop(): return {"text": "", "token_ids": [1], "finish_reason": "length"}
"""


@contextmanager
def worker(folder: Path, name: str, *command: str, **environment: str) -> Iterator[None]:
    """Run a worker process. Yields it when it is ready."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", *command, "-l", "WARNING", "-n", f"{name}@bench"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path(str(folder)), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def throughput(app: Celery, node: str, task: str, options: dict[str, Any], tasks: int) -> float:
    """Tasks a second. The queue is filled while the worker does not consume; then the clock runs until the last
    task has ended."""
    queue = app.conf.task_default_queue
    app.send_task(task, kwargs=options).get(timeout=120)  # it is ready, and warm
    while not app.control.cancel_consumer(queue, destination=[node], reply=True, timeout=5):
        pass
    results = [app.send_task(task, kwargs=options) for _ in range(tasks)]
    began = time.perf_counter()
    app.control.add_consumer(queue, destination=[node], reply=False)
    for result in reversed(
        results
    ):  # the last task first: waiting for each task in turn would measure the producer
        result.get(timeout=120)
    return tasks / (time.perf_counter() - began)


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    tasks, rounds = (50, 1) if options.quick else (2000, 5)
    url = f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    report = Report("One-token generations against a no-op task on Celery's threads pool (embedded Redis)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "noop_app.py").write_text(NOOP)
        apps = {}
        for queue in ("bench-noop", "bench-petiole"):
            apps[queue] = Celery(queue, set_as_current=False)
            apps[queue].conf.update(configuration(Settings(broker_url=url, queue=queue)))

        def noop() -> float:
            environment = {"PETIOLE_BROKER_URL": url, "PETIOLE_QUEUE": "bench-noop"}
            with worker(folder, "noop", "-A", "noop_app", "worker", "-c", "8", **environment):
                return throughput(apps["bench-noop"], "noop@bench", "noop", {}, tasks)

        def petiole() -> float:
            environment = {"PETIOLE_BROKER_URL": url, "PETIOLE_QUEUE": "bench-petiole", "PETIOLE_DEVICE": "cpu"}
            generation = {"prompt": "Count from 1 to 5.", "max_tokens": 1, "temperature": 0}
            with worker(folder, "petiole", "-A", "tasks", "worker", **environment):
                return throughput(apps["bench-petiole"], "petiole@bench", "tasks.generate", generation, tasks)

        report.compare(
            "one-token generations", "tasks/s", petiole, noop, rounds=rounds, target=TARGET, note="no-op"
        )
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
