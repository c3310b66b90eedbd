"""`petiole bench [WORKLOAD ...]`: run the benchmarks by name, one after another.

Each workload is a module of this package with a `main(argv)`; run alone it is `python -m bench.NAME`. With
`--json FOLDER` each writes `FOLDER/NAME.json`, from which `python -m bench.render` rebuilds the tables of
`bench/results/README.md`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

WORKLOADS: dict[str, str] = {
    "cache": "prefix caches and the page table",
    "scheduler": "the scheduler over a runtime that computes nothing",
    "overlap": "pipelined against blocking, with a device that only keeps time",
    "models": "decode and prefill on the CPU against transformers and llama.cpp",
    "mixtures": "decode steps of mixtures and of models with states, against llama.cpp",
    "vision": "questions about pictures, against Moondream's reference implementation",
    "batching": "a whole load at once, against transformers' generate and its continuous batching",
    "engine": "the engine driven directly: batches, arrivals, prefixes, chat, constraints, speculation",
    "embeddings": "vectors of texts against transformers and others; scores of pairs with and without reuse",
    "queued_texts": "vectors of texts through the queue, against the same engine alone",
    "tools": "a text divided into reasoning, content and calls; tools compiled, and enforced",
    "transport": "the Redis transport against kombu's own",
    "celery_noop": "one-token generations against Celery's no-op task",
    "latency": "from delay() until a reader has the first delta",
    "gateway": "petiole serve in turns with direct reading: first delta, one token, many streams",
    "page": "the gateway's page in Chromium: its first content",
    "serving": "the engine through the broker with readers, against the same engine driven directly",
    "batch": "petiole.batch beside a hand-made loop and a Celery group; what it finds in the cache, and holds",
    "beside": "chat beside rows of a batch that fill the engine",
    "pace": "a worker and its readers around a device as fast as a GPU, which only keeps time",
    "reliability": "an engine with log, fencing and leases against the same one without",
    "recovery": "a worker is killed or deployed in mid-sentence: how long its readers wait",
    "affinity": "conversations on a fleet: how much of a prompt is in the cache of the worker that gets it",
    "redis_cost": "the cost of a task and of a delta for Redis: commands, bytes, processor time",
    "simulate": "a fleet on paper: the real scheduler with a timed model, checked against the engine",
    "policies": "prefill policies on paper: the real scheduler with an H200's step time",
    "chunks": "prefill policies and chunk sizes on this machine's engine",
    "profiling": "where the time of a step goes, by phase; which threads of a worker wait for the interpreter",
    "growth": "how costs grow with numbers: of sequences, prompt tokens, cached tokens, waiting tasks, readers",
    "host": "the host's time for a step on CUDA, on a pretended card",
    "gpu": "decode and prefill on a CUDA device against their floors",
}

ON_CUDA = ("host", "gpu")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="petiole bench",
        description="Run benchmarks by name.",
        epilog="\n".join(f"  {name:12} {what}" for name, what in WORKLOADS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", nargs="*", metavar="WORKLOAD", help="which (default: all but those on CUDA)")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything runs")
    parser.add_argument("--profile", action="store_true", help="where the time goes: short for profiling")
    parser.add_argument("--json", metavar="FOLDER", help="write one JSON file for each workload")
    parser.add_argument("--plots", metavar="FOLDER", help="write plots (PNG)")
    options = parser.parse_args(argv)
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
            importlib.import_module(f"bench.{name}").main(arguments)
        except Exception as error:
            failed.append(name)
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr)
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


if __name__ == "__main__":
    sys.exit(main())
