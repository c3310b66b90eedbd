"""Does the host work while the device works? A device that only keeps time, pipelined and blocking.

The device takes a fixed time for a step, as a GPU seems to for the host. The host adds a fixed time to each
launch. A blocking step takes the sum of both times; a pipelined step takes the longer one. The engine is the real
one, with all of its threads. The floor of each figure is that ideal. The engine's own host time counts as the
host's: it is the time that a blocking step takes beyond the device's, with nothing added to its launch.

On a CPU that is busy with the model nothing overlaps, and pipelining must cost nothing. So petiole-tiny runs
pipelined and blocking, in many short rounds in turns. The figure is the median of the rounds' ratios, beside the
processor time that each engine takes for a step.

`--traces FOLDER` keeps a trace of each engine over such a device, as Chrome JSON (chrome://tracing,
ui.perfetto.dev).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from bench.harness import load, report
from bench.harness.stand_ins import TimedCopies, TimedRuntime
from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer

DEVICE_S = 0.010
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SEQUENCES = 8
BATCHES = (1, 8, 32)
ROWS = 64
VERIFY_S, DRAFTS = 0.007, 3


def step_s(pipeline: str, device_s: float, host_s: float, steps: int, tracer: Tracer = NO_TRACE) -> float:
    """Seconds of a step in the steady state, on the device: from one decode to the next."""
    starts: list[float] = []

    def on_span(stream: str, label: str, start: float, end: float) -> None:
        starts.append(start)
        tracer.record_device(stream, label, start, end)

    runtime = TimedRuntime(device_s, partial(time.sleep, host_s) if host_s else lambda: None, rows=SEQUENCES)
    runtime.on_span = on_span
    config = EngineConfig(pipeline="on" if pipeline == "on" else "off", max_num_seqs=SEQUENCES)
    with Engine(config, runtime=runtime, tracer=tracer) as engine:
        sampling = SamplingParams(max_tokens=steps + 8, temperature=0)
        requests = [Request(prompt=[1 + i, 2, 3], sampling=sampling) for i in range(SEQUENCES)]
        for handle in [engine.submit(request) for request in requests]:
            handle.result()
    return statistics.median(b - a for a, b in itertools.pairwise(starts[SEQUENCES:-SEQUENCES]))


def beside_copies(result: report.Report, steps: int) -> None:
    """A step of 64 rows takes 10 ms. In each, a row completes a chunk of KV of 4 MiB, which is copied to a file.
    How much later are steps than without files?"""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="petiole-bench-") as folder:
        for tier in ("", folder):
            starts: list[float] = []
            runtime = TimedRuntime(DEVICE_S, rows=ROWS)
            runtime.on_span = lambda stream, label, start, end, starts=starts: starts.append(start)
            runtime.kv_copies = TimedCopies(runtime, 64 * 1024)
            config = EngineConfig(max_num_seqs=ROWS, kv_tier=tier, kv_tier_gib=1)
            with Engine(config, runtime=runtime) as engine:
                sampling = SamplingParams(max_tokens=steps + ROWS, ignore_eos=True)
                prompts = [[1 + i, *[2] * i] for i in range(ROWS)]
                engine.generate([Request(prompt=prompt, sampling=sampling) for prompt in prompts])
                saved = engine.stats().get("kv_tier_saved_chunks", 0)
            behind = starts[2 * ROWS : -2 * ROWS]
            found[tier and "tier"] = sorted(b - a for a, b in itertools.pairwise(behind))
    for name, share in (("median", 0.5), ("95th percentile", 0.95)):
        with_tier, without = (1e3 * found[key][int(share * len(found[key]))] for key in ("tier", ""))
        note = f"peer: without; {saved} chunks of 4 MiB"
        title = f"64 rows, steps beside copies of KV to files: {name}"
        result.add(title, with_tier, "ms", peer=without, target=1.03, better="lower", note=note)


def with_drafts(result: report.Report, steps: int) -> None:
    """A device that takes 7 ms a step and accepts every draft: tokens a second, of those that it could yield."""
    for rows in (1, ROWS):
        runtime = TimedRuntime(VERIFY_S, rows=rows)
        config = EngineConfig(max_num_seqs=rows, speculative_tokens=DRAFTS)
        n_tokens = steps * (1 + DRAFTS)
        with Engine(config, runtime=runtime) as engine:
            sampling = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
            handles = [engine.submit(Request(prompt=[7] * 8, sampling=sampling)) for _ in range(rows)]
            counts = [(time.perf_counter(), engine.stats()["generated_tokens"])]
            while not all(handle.done() for handle in handles):
                time.sleep(VERIFY_S)
                counts.append((time.perf_counter(), engine.stats()["generated_tokens"]))
        steady = [at for at in counts if 0.2 * rows * n_tokens < float(at[1]) < 0.8 * rows * n_tokens]
        (begin, before), (end, after) = steady[0], steady[-1]
        result.add(
            f"{rows} rows, {DRAFTS} right drafts a step of {VERIFY_S * 1e3:.0f} ms",
            (float(after) - float(before)) / (end - begin),
            "tokens/s",
            floor=rows * (1 + DRAFTS) / VERIFY_S,
            target=0.95,
        )


def on_the_cpu(result: report.Report, batch: int, engines: Mapping[str, Engine], rounds: int, tokens: int) -> None:
    """Steps a second, and processor time of a step: each engine's against the other's of the same round."""
    wall: dict[str, list[float]] = {"on": [], "off": []}
    busy: dict[str, list[float]] = {"on": [], "off": []}
    for i in range(rounds):
        for mode in ("on", "off") if i % 2 else ("off", "on"):
            start = time.process_time()
            run = load.at_concurrency(engines[mode], load.requests(batch, 16, tokens), batch)
            busy[mode].append((time.process_time() - start) / tokens)
            wall[mode].append(tokens / run.seconds)
    for name, samples, unit, scale, better in (
        ("steps", wall, "steps/s", 1.0, "higher"),
        ("processor time a step", busy, "ms", 1e3, "lower"),
    ):
        ratios = sorted(a / b for a, b in zip(samples["on"], samples["off"], strict=True))
        peer = statistics.median(samples["off"]) * scale
        result.add(
            f"petiole-tiny, batch {batch}, pipelined against blocking: {name}",
            statistics.median(ratios) * peer,
            unit,
            peer=peer,
            spread=(ratios[rounds // 4], ratios[-1 - rounds // 4]),
            target=1.0 if better == "higher" else None,
            better=better,
            note=f"median of {rounds} rounds' ratios, spread of their middle half",
        )


def slept(seconds: float, rounds: int = 50) -> float:
    """The time that a sleep of this length really takes here."""
    start = time.perf_counter()
    for _ in range(rounds):
        time.sleep(seconds)
    return (time.perf_counter() - start) / rounds


def main(argv: list[str] | None = None) -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--traces", metavar="FOLDER", help="write the traces of both engines here")
    options = parser.parse_args(argv)
    steps = 30 if options.quick else 150
    result = report.Report("Overlap: a device that takes 10 ms a step")
    own = step_s("off", DEVICE_S, 0.0, steps) - DEVICE_S
    result.add("engine's own host time a step", own * 1e3, "ms")
    curves: dict[str, list[float]] = {"on": [], "off": []}
    for ratio in (0.5,) if options.quick else RATIOS:
        host = slept(DEVICE_S * ratio)
        ideal = {"on": max(DEVICE_S, host + own), "off": DEVICE_S + host + own}
        for pipeline in ("on", "off"):
            measured = step_s(pipeline, DEVICE_S, DEVICE_S * ratio, steps)
            curves[pipeline].append(measured)
            result.add(
                f"{'pipelined' if pipeline == 'on' else 'blocking'}, host/device {ratio:g}",
                measured * 1e3,
                "ms",
                floor=ideal[pipeline] * 1e3,
                target=1.05 if pipeline == "on" else None,
                better="lower",
            )
    with_drafts(result, 100 if options.quick else 300)
    beside_copies(result, 200 if options.quick else 600)
    modes = {mode: EngineConfig(device="cpu", pipeline=mode, prefix_cache="off") for mode in ("on", "off")}
    with Engine(modes["on"]) as pipelined, Engine(modes["off"]) as blocking:
        load.settle()
        for batch in (1,) if options.quick else BATCHES:
            engines = {"on": pipelined, "off": blocking}
            on_the_cpu(
                result, batch, engines, rounds=3 if options.quick else 31, tokens=16 if options.quick else 64
            )
    if options.plots and not options.quick:
        from bench.harness import plots

        relative = {mode: [seconds / DEVICE_S for seconds in found] for mode, found in curves.items()}
        plots.overlap(Path(options.plots) / "overlap.png", RATIOS, relative)
    if options.traces:
        Path(options.traces).mkdir(parents=True, exist_ok=True)
        for title, pipeline in (("blocking", "off"), ("pipelined", "on")):
            traced(pipeline).save(Path(options.traces) / f"trace-{title}.json")
    result.finish(options.json)


def traced(pipeline: str) -> Tracer:
    """A trace of 40 steps: 4 ms of device and 2 ms of host each."""
    tracer = Tracer()
    step_s(pipeline, 0.004, 0.002, 40, tracer)
    return tracer


if __name__ == "__main__":
    main()
