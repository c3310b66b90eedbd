"""Writes what follows from recorded figures: `python -m bench.render`.

bench/results/DEVICE/WORKLOAD.json   the file that a workload wrote with --json; DEVICE is cpu, cuda, or
                                     cpu-NAME for another processor
bench/results/notes.toml             a description of each workload, its pictures, why a target was missed, which
                                     targets need a machine that has not measured them, which records are
                                     older than what they measure (`older`, by device), and the headlines

bench/results/README.md              written whole: every figure, by processor and workload
docs/performance.md                  the headlines, between two marks
docs/scaling.md                      its tables, between marks
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.__main__ import MODULES, WORKLOADS
from bench.harness.report import number

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
RECORD = RESULTS / "README.md"
PAGE = ROOT / "docs" / "performance.md"
SCALING = ROOT / "docs" / "scaling.md"
DEVICES = {"cpu": "On the CPU", "cuda": "On a GPU"}
HEAD = """# The record

`python -m bench.render` makes every table here from the JSON files of this folder. One command made each of the
files; it stands under the table. Machines are shared and noisy, so a figure stands beside a *peer* or a *floor*. A
peer is somebody else's way to do the same work, in turns in the same run. A floor is the least that the hardware
needs, counted from the model's shape and from rates measured in that run. The ratio is value / peer, or value /
floor; its spread is over the rounds. A target bounds the ratio, or the value where there is none.
[How to repeat all of it, and how to add a processor](../../docs/performance.md#repeat-it).
"""
BY_PROCESSOR = ("models", "batching")
"""Workloads whose figures are shown for all processors side by side."""

Row = Sequence[str]
Run = Mapping[str, Any]


def record(results: Path = RESULTS) -> str:
    """`bench/results/README.md`."""
    with (results / "notes.toml").open("rb") as file:
        notes = tomllib.load(file)
    parts = [HEAD]
    if beside := side_by_side(results):
        parts.append(beside)
    measured = {device: load(results / device) for device in devices(results)}
    for device, title in devices(results).items():
        runs, kind = measured[device], device.partition("-")[0]
        waiting = unmeasured([measured[one] for one in measured if one.partition("-")[0] == kind], notes, device)
        if not runs and waiting:
            parts += [f"## {title}", f"### Targets: none measured\n\n{markdown(TARGETS, waiting)}"]
        if runs:
            parts += [f"## {title}", machine(runs), targets(runs, notes, waiting)]
            usual = usual_run(runs)
            parts += [
                section(name, run, notes.get(name, {}), device, elsewhere(run, usual))
                for name, run in runs.items()
            ]
    if closing := notes.get("closing"):
        parts.append(str(closing).strip())
    return "\n\n".join(part.strip() for part in parts) + "\n"


def devices(results: Path) -> dict[str, str]:
    """The devices' titles, by folder: other processors follow the first."""
    further = {folder.name: f"On the CPU: {folder.name[4:]}" for folder in sorted(results.glob("cpu-*"))}
    return {"cpu": DEVICES["cpu"], **further, "cuda": DEVICES["cuda"]}


def side_by_side(results: Path) -> str:
    """The figure of each processor, and its ratio to the best peer there; nothing if there is only one
    processor."""
    measured = {device: load(results / device) for device in devices(results) if device != "cuda"}
    measured = {device: runs for device, runs in measured.items() if not runs.keys().isdisjoint(BY_PROCESSOR)}
    if len(measured) < 2:
        return ""
    rows: dict[str, dict[str, str]] = {}
    for device, runs in measured.items():
        for name in BY_PROCESSOR:
            for result in runs.get(name, {"results": []})["results"]:
                beside = f" ({ratio(result)})" if result["ratio"] is not None else ""
                value = f"{number(result['value'])} {result['unit']}{beside}"
                rows.setdefault(f"{name}: {result['name'].strip()}", {})[device] = value
    names = [
        ", ".join([usual_run(runs)["machine"]["cpu"], *device.split("-")[1:]]) for device, runs in measured.items()
    ]
    table = markdown(["", *names], [(row, *(cells.get(d, "") for d in measured)) for row, cells in rows.items()])
    return f"## Processors side by side\n\nIn brackets: the ratio to the best peer, or to the floor.\n\n{table}"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """The recorded results, in the order in which the workloads are listed."""
    known = [*WORKLOADS, *sorted(path.stem for path in folder.glob("*.json") if path.stem not in WORKLOADS)]
    paths = {name: folder / f"{name}.json" for name in known}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def machine(runs: Mapping[str, Run]) -> str:
    """The machine and the software with which most results were recorded."""
    usual = usual_run(runs)
    return f"{hardware(usual)}; {', '.join(software(usual))}."


def usual_run(runs: Mapping[str, Run]) -> Run:
    """A run on the machine that most runs share, with all the software of that machine."""
    common = Counter(map(hardware, runs.values())).most_common(1)[0][0]
    return max((run for run in runs.values() if hardware(run) == common), key=lambda run: len(run["versions"]))


def hardware(run: Run) -> str:
    facts = run["machine"]
    driver = f" (driver {facts['driver']})" if facts.get("driver") else ""
    device = f"{facts['gpu']}{driver}, " if "gpu" in facts else ""
    return f"{device}{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"


def computer(run: Run, device: str) -> str:
    """What computed: a card or a processor."""
    name: str = run["machine"]["gpu" if device == "cuda" else "cpu"]
    return name


def short(computer: str) -> str:
    """Its name without what no other of these tables has."""
    return re.sub(r"\(R\)|NVIDIA | \d+GB HBM\w*| Processor", "", computer)


def software(run: Run) -> list[str]:
    return [f"{name} {version}" for name, version in run["versions"].items() if name != "petiole"]


def elsewhere(run: Run, usual: Run) -> str:
    """The differences when a result was recorded: the machine, and versions of software that both runs had."""
    both = run["versions"].keys() & usual["versions"].keys()
    others = [each for each in software(run) if each not in software(usual) and each.split()[0] in both]
    return ", ".join(([] if hardware(run) == hardware(usual) else [hardware(run)]) + others)


TARGETS = ("", "", "measured", "ratio", "target", "")


def targets(runs: Mapping[str, Run], notes: Mapping[str, Any], waiting: Sequence[Row]) -> str:
    """Each target, its figure, and the gap if it was missed. `waiting`: targets without a figure."""
    rows: list[Row] = []
    usual = usual_run(runs)
    for name, run in runs.items():
        for result in run["results"]:
            if result["target"] is None:
                continue
            verdict = "met" if result["met"] else f"**missed** {cause(result, notes.get(name, {}))}".strip()
            value = f"{number(result['value'])} {result['unit']}".strip()
            where = name if hardware(run) == hardware(usual) else f"{name} (another machine)"
            rows.append((where, result["name"].strip(), value, ratio(result), bound(result), verdict))
    met = sum(row[-1] == "met" for row in rows)
    table = markdown(TARGETS, [*rows, *waiting])
    return f"### Targets: {met} of {len(rows)} met\n\n{table}"


def unmeasured(runs: Sequence[Mapping[str, Run]], notes: Mapping[str, Any], device: str) -> list[Row]:
    """The targets of notes.toml for `device` that no result has, with the reason.

    `runs`: the runs of all devices of the same kind. A target that one processor has measured need not be measured
    on another."""
    rows: list[Row] = []
    for workload, about in notes.items():
        for wanted in about.get("wanted", ()) if isinstance(about, Mapping) else ():
            results = [r for each in runs for r in each.get(workload, {"results": []})["results"]]
            measured = any(r["target"] is not None and re.search(wanted["match"], r["name"]) for r in results)
            if wanted.get("device", "cpu") == device and not measured:
                reason = wanted.get("reason", "not measured yet")
                rows.append((workload, wanted["what"], "", "", wanted["target"], reason))
    return rows


def section(name: str, run: Run, notes: Mapping[str, Any], device: str, where: str = "") -> str:
    about = str(notes.get("about", WORKLOADS.get(name, ""))).strip()
    head = ("", "value", "unit", "peer", "floor", "ratio", "spread", "target", "")
    rows = [
        (
            indented(result["name"]),
            number(result["value"]),
            result["unit"],
            number(result["peer"]),
            number(result["floor"]),
            number(result["ratio"]),
            " - ".join(number(side) for side in result["spread"]) if result["spread"] else "",
            bound(result),
            "; ".join(filter(None, [{None: "", True: "met", False: "missed"}[result["met"]], result["note"]])),
        )
        for result in run["results"]
    ]
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    table = markdown([head[i] for i in used], [[row[i] for i in used] for row in rows])
    pictures = [
        f"![{alt}](../../docs/images/{file})" for file, alt in notes.get("images", {}).items() if picture(file)
    ]
    flag = " --device cuda" if device == "cuda" and name == "engine" else ""
    absent = "\n".join(f"{peer}: {why}" for peer, why in run.get("absent", {}).items())
    repeat = f"`python -m {called(name, run)}{flag}`. Recorded at commit {run['commit']}"
    older = str(notes.get("older", {}).get(device, ""))
    where = f"Recorded elsewhere: {where}." if where else ""
    parts = [f"### {name}: {run['title']}", about, older, where, table, absent]
    return "\n\n".join(filter(None, [*parts, *pictures, f"Repeat: {repeat}{took(run)}."]))


def called(name: str, run: Run) -> str:
    """The workload's module, where it lies now, and the arguments that the record has."""
    workload, _, arguments = run.get("command", "").partition(".py")
    return MODULES[workload] + arguments if workload in MODULES else MODULES.get(name, f"bench.{name}")


def took(run: Run) -> str:
    return f", in {run['seconds']:.0f} s" if "seconds" in run else ""


def picture(file: str) -> bool:
    return (PAGE.parent / "images" / file).exists()


def indented(name: str) -> str:
    return f"&nbsp;&nbsp;{name.strip()}" if name.startswith(" ") else name


def bound(result: Mapping[str, Any]) -> str:
    if result["target"] is None:
        return ""
    return f"{'≥' if result['better'] == 'higher' else '≤'} {result['target']:g}"


def ratio(result: Mapping[str, Any]) -> str:
    return number(result["ratio"])


def cause(result: Mapping[str, Any], notes: Mapping[str, Any]) -> str:
    """Why a target was missed, if that is known: the first gap whose pattern is in the name."""
    for gap in notes.get("gap", ()):
        if re.search(gap["match"], result["name"]):
            return str(gap["cause"]).strip()
    return ""


def unexplained(results: Path = RESULTS) -> Iterator[str]:
    """Missed targets without a cause. The record must not have any."""
    with (results / "notes.toml").open("rb") as file:
        notes = tomllib.load(file)
    for device in devices(results):
        for name, run in load(results / device).items():
            for result in run["results"]:
                if result["met"] is False and not cause(result, notes.get(name, {})):
                    yield f"{device}/{name}: {result['name'].strip()}"


def markdown(head: Row, rows: Sequence[Row]) -> str:
    """A table; figures are aligned by their headings."""
    words = {"", "unit", "target", "measured"}
    rule = "|".join(["", *("---" if name in words else "---:" for name in head), ""])
    heading, *lines = ("| " + " | ".join(cell or " " for cell in row) + " |" for row in (head, *rows))
    return "\n".join([heading, rule, *lines])


# ---------------------------------------------------------------- docs/performance.md


def headlines(results: Path = RESULTS) -> str:
    """What was asked, measured and compared: a row for each processor that has measured it."""
    with (results / "notes.toml").open("rb") as file:
        notes = tomllib.load(file)
    wanted = notes.get("headline", ())
    measured = {device: load(results / device) for device in devices(results)}
    rows: list[Row] = []
    for headline in wanted:
        older = notes.get(headline["workload"], {}).get("older", {})
        for device, runs in measured.items():
            for result in runs.get(headline["workload"], {"results": []})["results"]:
                if re.search(headline["match"], result["name"]):
                    value = f"{number(result['value'])} {result['unit']}".strip()
                    row = (
                        headline["what"],
                        value,
                        headline["beside"],
                        ratio(result),
                        short(computer(usual_run(runs), device)) + (", older" if device in older else ""),
                    )
                    rows.append(row)
    return markdown(("", "measured", "beside", "ratio", "on"), rows)


def verdicts(results: Path = RESULTS) -> str:
    """How many targets each device has met."""
    lines = []
    for device, title in devices(results).items():
        runs = load(results / device)
        judged = [r["met"] for run in runs.values() for r in run["results"] if r["target"] is not None]
        name = f"{title} ({computer(usual_run(runs), device)})" if runs else title
        lines.append(f"- {name}: {f'{sum(judged)} of {len(judged)} targets met' if runs else 'nothing measured'}.")
    return "\n".join(lines)


def filled(text: str, blocks: Mapping[str, str]) -> str:
    """The page with new text between the marks of each block."""
    for name, block in blocks.items():
        opening, closing = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = text.partition(opening)
        text = before + opening + block + closing + rest.partition(closing)[2]
    return text


def page(text: str, results: Path = RESULTS) -> str:
    """`docs/performance.md` with new headlines. Its prose is written by hand."""
    return filled(text, {"headlines": headlines(results), "verdicts": verdicts(results)})


# ---------------------------------------------------------------- docs/scaling.md

BUSY = 0.7
ANSWERS = (1, 64, 256, 1024)
TOKENS_A_DELTA = (1, 5)


def scaling(text: str, results: Path = RESULTS) -> str:
    """`docs/scaling.md` with new tables from the recorded figures. Its prose is written by hand."""
    runs = load(results / "cpu")
    blocks: dict[str, str] = {}
    if "redis_cost" in runs:
        figures = {r["name"]: r["value"] for r in runs["redis_cost"]["results"]}
        blocks |= {"costs": costs(figures), "full": full(figures)}
    return filled(text, blocks)


def costs(figures: Mapping[str, float]) -> str:
    """The counts of Redis, side by side."""
    names = [name.partition(": ")[2] for name in figures if name.startswith("commands: ")]
    kinds = ("commands", "bytes in", "bytes out", "processor us")
    rows = [(name, *(number(figures[f"{kind}: {name}"]) for kind in kinds)) for name in names]
    return markdown(("", "commands", "bytes in", "bytes out", "processor time, us"), rows)


def full(figures: Mapping[str, float]) -> str:
    """Tasks and tokens a second at which one Redis is busy for `BUSY` of its time, with one reader for each
    task."""
    task = figures["processor us: a task with one reader, without its deltas"]
    delta = figures["processor us: a delta with one reader"]
    rows = []
    for answer in ANSWERS:
        row = [f"{answer:,}"]
        for tokens in TOKENS_A_DELTA:
            tasks = BUSY * 1e6 / (task + delta * max(1, answer / tokens))
            row += [number(tasks), number(tasks * answer)]
        rows.append(row)
    head = ["tokens of an answer"]
    for tokens in TOKENS_A_DELTA:
        head += [f"tasks/s, {tokens} token{'s' * (tokens > 1)} a delta", "tokens/s"]
    return markdown(head, rows)


def main() -> None:
    RECORD.write_text(record())
    PAGE.write_text(page(PAGE.read_text()))
    SCALING.write_text(scaling(SCALING.read_text()))
    print("wrote " + ", ".join(str(path.relative_to(ROOT)) for path in (RECORD, PAGE, SCALING)))
    for missing in unexplained():
        print(f"missed, and no cause in notes.toml: {missing}")


if __name__ == "__main__":
    main()
