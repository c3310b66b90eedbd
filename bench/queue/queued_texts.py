"""Vectors of texts through the queue, in turns with the same engine alone: what Celery, Redis and the stored
vectors cost.

Each task has many texts of one length. The queue is filled before the clock runs, and a task counts once its
result is read. The engine alone gets the same texts as requests.

    python -m bench.queue.queued_texts [--quick] [--json PATH]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from celery import Celery

from bench.harness import load
from bench.harness.checkpoints.encoders import MINILM, words
from bench.harness.runs import arguments, opened
from bench.queue.celery_noop import throughput, worker
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request
from petiole.tasks.app.configuration import configuration
from petiole.tasks.servers import embedded
from petiole.tasks.settings import Settings

TARGET = 0.95
QUEUE = "bench-texts"


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    bench = opened("Vectors of texts through the queue (embedded Redis)", options)
    tasks, texts, tokens = bench.pick((2, 16, 16), (16, 32, 128))
    url = f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    app = Celery(QUEUE, set_as_current=False)
    app.conf.update(configuration(Settings(broker_url=url, queue=QUEUE)))
    given = words(texts, tokens - 2)
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as name:
        model, folder = Path(name) / "model", Path(name)
        model.mkdir()
        MINILM.write(model)
        environment = {
            "PETIOLE_BROKER_URL": url,
            "PETIOLE_QUEUE": QUEUE,
            "PETIOLE_DEVICE": "cpu",
            "PETIOLE_MODEL": str(model),
            "PETIOLE_DTYPE": "float32",
            "PETIOLE_NUM_THREADS": str(bench.threads),
        }
        config = EngineConfig(model=str(model), device="cpu", dtype="float32", num_threads=bench.threads)
        with Engine(config) as engine, worker(folder, "texts", "-A", "tasks", "worker", **environment):
            load.settle()

            def queued() -> float:
                return texts * throughput(app, "texts@bench", "tasks.embed", {"texts": given}, tasks)

            def alone() -> float:
                began = time.perf_counter()
                engine.generate([Request(texts=given, embedding=Embedding())] * tasks)
                return texts * tasks / (time.perf_counter() - began)

            alone()
            bench.report.compare(
                f"{MINILM.name}, {tasks} tasks of {texts} texts of {tokens} tokens, beside the engine alone",
                "texts/s",
                queued,
                alone,
                rounds=bench.pick(1, 3),
                target=TARGET,
            )
    bench.report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
