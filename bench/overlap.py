"""Does the host work while the device works? A model that sleeps, pipelined and blocking.

The device sleeps for a fixed time a step, as a GPU looks from the host; the host adds a fixed time to each launch.
Blocking, a step takes their sum; pipelined, the longer of the two. The engine is the real one, with all of its
threads. The floor of each figure is that ideal, with the engine's own host time (measured with both at zero)
counted to the host.

Where nothing overlaps, on a CPU that is busy with the model, pipelining must cost nothing: petiole-tiny, pipelined
and blocking, in many short rounds in turns. What counts is the median of the rounds' ratios, beside the processor
time that each engine takes for a step.

With `--plots FOLDER` it also draws the two timelines of some steps, from a trace of each engine; `--traces FOLDER`
keeps the traces, as Chrome JSON (chrome://tracing, ui.perfetto.dev).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from bench import load, report
from gpu_worker import Engine, EngineConfig, Request, SamplingParams
from gpu_worker.runtime.stand_ins import SleepingRuntime
from gpu_worker.tracing import NO_TRACE, Tracer

DEVICE_S = 0.010
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
SEQUENCES = 8
BATCHES = (1, 8, 32)


def step_s(pipeline: str, device_s: float, host_s: float, steps: int, tracer: Tracer = NO_TRACE) -> float:
    """Seconds a step in the steady state: between the first and the last token of sequences side by side."""
    runtime = SleepingRuntime(device_s=device_s, host_s=host_s, rows=SEQUENCES)
    runtime.device.on_span = tracer.record_device if tracer.enabled else None
    config = EngineConfig(pipeline="on" if pipeline == "on" else "off", max_num_seqs=SEQUENCES)
    stamps: list[float] = []
    with Engine(config, runtime=runtime, tracer=tracer) as engine:
        sampling = SamplingParams(max_tokens=steps + 8, temperature=0)
        requests = [Request(prompt=[1 + i, 2, 3], sampling=sampling) for i in range(SEQUENCES)]
        handles = [engine.submit(requests[0], on_delta=lambda _, delta: stamps.append(time.perf_counter()))]
        handles += [engine.submit(request) for request in requests[1:]]
        for handle in handles:
            handle.result()
    gaps = [b - a for a, b in itertools.pairwise(stamps[4:-1])]
    return statistics.median(gaps)


def on_the_cpu(result: report.Report, batch: int, engines: Mapping[str, Engine], rounds: int, tokens: int) -> None:
    """Steps a second and processor time a step, each engine's against the other's of the same round."""
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
    """What a sleep of so long really takes here."""
    start = time.perf_counter()
    for _ in range(rounds):
        time.sleep(seconds)
    return (time.perf_counter() - start) / rounds


def main(argv: list[str] | None = None) -> None:
    parser = report.arguments(__doc__)
    parser.add_argument("--traces", metavar="FOLDER", help="write the traces of both engines here")
    options = parser.parse_args(argv)
    steps = 30 if options.quick else 150
    result = report.Report("Overlap: a model that sleeps 10 ms a step")
    own = step_s("off", 0.0, 0.0, steps)
    result.add("engine's own host time a step", own * 1e3, "ms")
    device = slept(DEVICE_S)
    curves: dict[str, list[float]] = {"on": [], "off": []}
    for ratio in (0.5,) if options.quick else RATIOS:
        host = slept(DEVICE_S * ratio)
        ideal = {"on": max(device, host + own), "off": device + host + own}
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
    modes = {mode: EngineConfig(device="cpu", pipeline=mode, prefix_cache="off") for mode in ("on", "off")}  # type: ignore[arg-type]
    with Engine(modes["on"]) as pipelined, Engine(modes["off"]) as blocking:
        load.settle()
        for batch in (1,) if options.quick else BATCHES:
            engines = {"on": pipelined, "off": blocking}
            on_the_cpu(
                result, batch, engines, rounds=3 if options.quick else 31, tokens=16 if options.quick else 64
            )
    if options.plots and not options.quick:
        plot(Path(options.plots) / "overlap.png", curves, device)
    if options.plots or options.traces:
        tracers = {title: traced(pipeline) for title, pipeline in (("blocking", "off"), ("pipelined", "on"))}
        if options.plots:
            draw_timelines(Path(options.plots) / "timeline.png", tracers)
        if options.traces:
            Path(options.traces).mkdir(parents=True, exist_ok=True)
            for title, tracer in tracers.items():
                tracer.save(Path(options.traces) / f"trace-{title}.json")
    result.finish(options.json)


def plot(path: Path, curves: dict[str, list[float]], device: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    axes.plot(RATIOS, [t / device for t in curves["off"]], "o-", color="tab:gray", label="blocking")
    axes.plot(RATIOS, [t / device for t in curves["on"]], "o-", color="tab:green", label="pipelined")
    axes.plot(RATIOS, [max(1, r) for r in RATIOS], "k:", linewidth=1, label="max(device, host)")
    axes.set_xlabel("host time / device time")
    axes.set_ylabel("step time / device time")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


COLOURS = {
    "plan": "tab:orange",
    "launch": "tab:red",
    "wait": "lightgray",
    "commit": "tab:purple",
    "forward": "tab:green",
    "copy": "tab:blue",
}


def traced(pipeline: str) -> Tracer:
    """A trace of 40 steps: 4 ms of device and 2 ms of host each."""
    tracer = Tracer()
    step_s(pipeline, 0.004, 0.002, 40, tracer)
    return tracer


def draw_timelines(path: Path, tracers: Mapping[str, Tracer], first: int = 20, count: int = 5) -> None:
    """Some steps of each engine, host above device."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(tracers), 1, figsize=(10, 4.2), sharex=True)
    for axis, (title, tracer) in zip(axes, tracers.items(), strict=True):
        spans = [span for span in tracer.spans() if span["name"] in COLOURS]
        origin = min(span["ts"] for span in spans if span["args"].get("step") == first)
        for span in spans:
            if first <= (span["args"].get("step") or 0) < first + count:
                y = {"engine": 2, "compute": 1, "copy": 0}[span["line"]]
                left, width = (span["ts"] - origin) / 1e3, span["dur"] / 1e3
                axis.barh(y, width, left=left, color=COLOURS[span["name"]], edgecolor="white", linewidth=0.3)
                if span["name"] in ("forward", "launch"):
                    axis.text(left + width / 2, y, str(span["args"]["step"] - first), ha="center", va="center")
        axis.set_yticks([2, 1, 0], ["host", "compute", "copy"])
        axis.set_title(title, loc="left")
    axes[-1].set_xlabel("milliseconds; the numbers are steps")
    axes[0].legend(handles=[Patch(color=c, label=n) for n, c in COLOURS.items()], ncol=6, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
