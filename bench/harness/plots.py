"""The pictures of the record. The benchmarks that measure the figures draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogFormatter, MaxNLocator

Span = Mapping[str, Any]
COLOURS = {
    "plan": "#c6dbef",
    "launch": "#6baed6",
    "mask": "#756bb1",
    "sample": "#2171b5",
    "wait": "#eeeeee",
    "commit": "#fd8d3c",
    "decode": "#31a354",
    "prefill": "#006d2c",
    "copy": "#bdbdbd",
}
SHOWN_STEPS = 6


class Plain(LogFormatter):
    """2,000 and not 2 × 10³, at the ticks that would have a label."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,.10g}" if super().__call__(x, pos) else ""


def plain(axis: Any) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain())


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def throughput(path: Path, curves: Mapping[str, Sequence[tuple[int, float, float]]]) -> None:
    """curves: shape -> (requests at once, tokens a second, the most that the floor allows)."""
    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.2 * len(curves), 3.6), squeeze=False)
    for axes, (name, points) in zip(panels[0], curves.items(), strict=True):
        batches = [batch for batch, _, _ in points]
        axes.plot(batches, [rate for _, rate, _ in points], "o-", color="tab:green", label="measured")
        axes.plot(batches, [floor for _, _, floor in points], "k:", label="floor: torch's rates")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_yscale("log")
        plain(axes.yaxis)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("requests at once")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("output tokens a second")
    panels[0][0].legend(fontsize=8)
    save(figure, path)


def latency(path: Path, loads: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """loads: name of the load -> (TTFTs, gaps between deltas), in ms."""
    figure, panels = pyplot.subplots(1, 2, figsize=(8.4, 3.6), sharey=True)
    for axes, which, title in zip(panels, (0, 1), ("TTFT", "between deltas"), strict=True):
        for name, samples in loads.items():
            ordered = sorted(samples[which])
            axes.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], label=name)
        axes.set_xscale("log")
        axes.set_xlabel(f"{title}, ms")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("share of the samples")
    panels[0].legend(fontsize=8)
    save(figure, path)


def hit_rate(path: Path, rates: Mapping[str, Sequence[float]]) -> None:
    """rates: cache -> share of the prompt tokens that were cached, turn by turn."""
    figure, axes = pyplot.subplots(figsize=(5.2, 3.4))
    for name, values in rates.items():
        axes.plot(range(1, len(values) + 1), values, "o-", label=f"cache {name}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("turn of the conversation")
    axes.set_ylabel("cached share of the prompt")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def overlap(path: Path, ratios: Sequence[float], steps: Mapping[str, Sequence[float]]) -> None:
    """steps: "on" and "off" -> the time of a step at each ratio of host to device time, in units of device
    time."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    axes.plot(ratios, steps["off"], "o-", color="tab:gray", label="blocking")
    axes.plot(ratios, steps["on"], "o-", color="tab:green", label="pipelined")
    axes.plot(ratios, [max(1, ratio) for ratio in ratios], "k:", linewidth=1, label="max(device, host)")
    axes.set_xlabel("host time / device time")
    axes.set_ylabel("step time / device time")
    axes.set_ylim(bottom=0)
    axes.legend()
    save(figure, path)


def timeline(path: Path, traces: Mapping[str, Sequence[Span]]) -> None:
    """traces: "on" and "off" -> spans of an engine. Shows a few decode steps from the middle of each."""
    figure, panels = pyplot.subplots(len(traces), 1, figsize=(9, 2.2 * len(traces)), squeeze=False, sharex=True)
    named: dict[str, Any] = {}
    for axes, (mode, spans) in zip(panels[:, 0], traces.items(), strict=True):
        lines = [line for line in ("engine", "compute") if any(span["line"] == line for span in spans)]
        begin, end = _window(spans)
        for y, line in enumerate(reversed(lines)):
            for span in spans:
                if span["line"] == line and begin <= span["ts"] < end:
                    at, long = (span["ts"] - begin) / 1e3, span["dur"] / 1e3
                    bars = axes.barh(y, long, left=at, height=0.7, color=COLOURS.get(span["name"], "#999999"))
                    named.setdefault(span["name"], bars)
        axes.set_yticks(range(len(lines)), ["host" if line == "engine" else "device" for line in reversed(lines)])
        axes.set_title("pipelined" if mode == "on" else "blocking", fontsize=10, loc="left")
    panels[-1][0].set_xlabel("ms")
    figure.legend(named.values(), named.keys(), loc="upper right", ncols=len(named), fontsize=8)
    save(figure, path)


def _window(spans: Iterable[Span]) -> tuple[float, float]:
    """The quickest run of a few steps in a row, in the trace's microseconds: other processes only make steps
    longer."""
    starts = [span["ts"] for span in spans if span["line"] == "compute" and span["name"] == "decode"]
    long = min(SHOWN_STEPS, len(starts) - 1)
    return min(zip(starts, starts[long:], strict=False), key=lambda window: window[1] - window[0])


def growth(
    path: Path, curves: Mapping[str, tuple[str, Callable[[float], float] | None, Sequence[tuple[float, float]]]]
) -> None:
    """curves: name -> (unit, the count to which the total cost should be proportional, (size, cost)).

    The dotted line is the limit: proportional to the count, or level for the cost of one.
    """
    columns = 3
    rows = -(-len(curves) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3.2 * rows), squeeze=False)
    for axes in panels.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (name, (unit, counted, points)) in zip(panels.flat, curves.items(), strict=False):
        sizes, costs = [size for size, _ in points], [cost for _, cost in points]
        axes.loglog(sizes, costs, "o-", color="tab:blue", label="measured")
        last = counted(sizes[-1]) if counted else 1.0
        allowed = [costs[-1] * counted(size) / last if counted else costs[0] for size in sizes]
        axes.loglog(sizes, allowed, "k:", label="in proportion" if counted else "level")
        axes.set_ylim(min(costs) / 3, max(costs) * 3)
        plain(axes.xaxis)
        plain(axes.yaxis)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel(name)
        axes.set_ylabel(unit)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    save(figure, path)
