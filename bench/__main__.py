"""`petiole bench [WORKLOAD ...]`: run the benchmarks by name, one after another.

Each workload is a module with a `main(argv)`; run alone it is `python -m bench.FOLDER.NAME`, or `python -m
bench.NAME` if a folder has its name. With `--json FOLDER` each writes `FOLDER/NAME.json`, from which `python -m
bench.render` rebuilds the tables of `bench/results/README.md`. `petiole bench share` runs some, and writes a file
to send in.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

_ROOMS: dict[str, str] = {
    "scheduler.cache": "prefix caches and the page table",
    "scheduler": "the scheduler over a runtime that computes nothing",
    "scheduler.overlap": "pipelined against blocking, with a device that only keeps time",
    "models": "decode and prefill on the CPU against transformers and llama.cpp",
    "models.mixtures": "decode steps of mixtures and of models with states, against llama.cpp",
    "models.files": "a GGUF file against llama.cpp: loading, memory, decode steps",
    "models.vision": "questions about pictures, against Moondream's reference implementation",
    "models.batching": "a whole load at once, against transformers' generate and continuous batching",
    "engine": "the engine driven directly: batches, arrivals, prefixes, chat, constraints, speculation",
    "models.embeddings": "vectors of texts against others; scores of pairs with and without reuse",
    "queue.queued_texts": "vectors of texts through the queue, against the same engine alone",
    "queue.transport": "the Redis transport against kombu's own",
    "queue.celery_noop": "one-token generations against Celery's no-op task",
    "queue.latency": "from delay() until a reader has the first delta",
    "gateway": "petiole serve in turns with direct reading: first delta, one token, many streams",
    "gateway.page": "the gateway's page in Chromium: its first content",
    "queue.serving": "the engine through the broker with readers, against the same engine driven directly",
    "engine.vllm_engine": "vLLM's engine behind a worker, with readers, against vLLM's own LLM.generate",
    "queue.batch": "petiole.batch beside a hand-made loop and a Celery group; what it holds",
    "engine.beside": "chat beside rows of a batch that fill the engine",
    "engine.pace": "a worker and its readers around a device as fast as a GPU, which only keeps time",
    "queue.reliability": "an engine with log, fencing and leases against the same one without",
    "queue.recovery": "a worker is killed or deployed in mid-sentence: how long its readers wait",
    "queue.affinity": "conversations on a fleet: how much of a prompt is in its worker's cache",
    "queue.redis_cost": "the cost of a task and of a delta for Redis: commands, bytes, processor time",
    "queue.traces": "what a trace of a task costs: tokens a second, and processor time of its spans",
    "scheduler.day": "workers that come and go with a day's work, on paper, beside a fleet that never sleeps",
    "scheduler.simulate": "a fleet on paper: the real scheduler with a timed model, checked against the engine",
    "scheduler.policies": "prefill policies on paper: the real scheduler with an H200's step time",
    "engine.chunks": "prefill policies and chunk sizes on this machine's engine",
    "engine.profiling": "where the time of a step goes; which of a worker's threads wait for the interpreter",
    "engine.growth": "how costs grow with numbers: of sequences, tokens, waiting tasks, readers",
    "gpu.host": "the host's time for a step on CUDA, on a pretended card",
    "queue.submission": "submissions from one process, and while the broker is away",
    "gpu": "decode and prefill on a CUDA device against their floors",
}

WORKLOADS = {room.rpartition(".")[2]: about for room, about in _ROOMS.items()}
MODULES = {room.rpartition(".")[2]: f"bench.{room}" for room in [*_ROOMS, "share"]}
"""As `python -m` takes them. A workload whose name is a folder's begins in the folder's `__main__`."""

ON_CUDA = ("host", "gpu")
SHARE = "share"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="petiole bench",
        description="Run benchmarks by name.",
        epilog=f"  {SHARE:12} [WORKLOAD ...]: one file to send in\n"
        + "\n".join(f"  {name:12} {what}" for name, what in WORKLOADS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", metavar="WORKLOAD", help="which (default: all but those on CUDA)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything runs")
    parser.add_argument("--profile", action="store_true", help="where the time goes: short for profiling")
    parser.add_argument("--json", metavar="FOLDER", help="write one JSON file for each workload")
    parser.add_argument("--plots", metavar="FOLDER", help="write plots (PNG)")
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == [SHARE]:
        return _begin(SHARE)(given[1:]) or 0
    options = parser.parse_args(given)
    unknown = [name for name in options.workload if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {', '.join(unknown)}; known: {', '.join(WORKLOADS)}")

    everything = [name for name in WORKLOADS if name not in ON_CUDA]
    chosen = [*options.workload, *(["profiling"] if options.profile else [])] or everything
    failed, seconds = [], dict[str, float]()
    for name in chosen:
        arguments = ["--quick"] if options.quick else []
        if options.json:
            arguments += ["--json", str(Path(options.json) / f"{name}.json")]
        if options.plots:
            arguments += ["--plots", options.plots]
        print(f"\n=== {name}: {WORKLOADS[name]}", flush=True)
        start = time.monotonic()
        try:
            _begin(name)(arguments)
        except Exception as error:
            failed.append(name)
            missing = ". `pip install -e '.[bench]'` brings it" if isinstance(error, ModuleNotFoundError) else ""
            print(f"{name} failed: {type(error).__name__}: {error}{missing}", file=sys.stderr)
        seconds[name] = time.monotonic() - start
        print(f"=== {name}: {seconds[name]:.0f} s", flush=True)
    print(
        "\n"
        + "\n".join(
            f"{name:12} {took:6.0f} s" for name, took in [*seconds.items(), ("all", sum(seconds.values()))]
        )
    )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _begin(name: str) -> Callable[[list[str]], int | None]:
    module = importlib.import_module(MODULES[name])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{MODULES[name]}.__main__")
    begin: Callable[[list[str]], int | None] = module.main
    return begin


if __name__ == "__main__":
    sys.exit(main())
