"""Figures become ratios, verdicts and a page; counts of bytes and operations are those of the models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import render
from bench.harness import report
from bench.harness.checkpoints.decoders import MIXTURE, QWEN3_06B, SMALL, TINY, Shape, checkpoint
from bench.harness.report import (
    Measurement,
    NotFiniteError,
    Report,
    best_of,
    command,
    compare,
    median_of,
    percentile,
)


def test_a_target_bounds_the_ratio_where_there_is_one() -> None:
    assert Measurement("m", 30, "tokens/s", peer=20, target=1.2).met is True
    assert Measurement("m", 20, "tokens/s", peer=20, target=1.2).met is False
    assert Measurement("m", 14.0, "ms", target=15.0, better="lower").met is True
    assert Measurement("m", 14.0, "ms").met is None


def test_the_peer_comes_before_the_floor() -> None:
    assert Measurement("m", 30, "tokens/s", peer=20, floor=60).ratio == 1.5
    assert Measurement("m", 30, "tokens/s", floor=60).ratio == 0.5


def test_sides_take_turns_and_each_goes_first() -> None:
    turns: list[str] = []

    def side(name: str, rate: float) -> float:
        turns.append(name)
        return rate

    ours, peer, spread = compare(lambda: side("a", 4.0), lambda: side("b", 2.0), rounds=4)
    assert (ours, peer, spread) == (4.0, 2.0, (2.0, 2.0))
    assert sorted(turns) == ["a"] * 4 + ["b"] * 4
    assert turns[0] != turns[2]


def test_a_copy_without_its_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert report.commit() != "unknown"
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    monkeypatch.setenv("GIT_COMMIT", "abc")
    assert report.commit() == "abc"


@pytest.mark.parametrize(("figure", "seconds"), [(best_of, 1), (median_of, 2)])
def test_work_takes_as_long_as_its_best_call_or_as_its_median(
    figure: Callable[..., float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0, 1, 10, 15, 20, 22])  # calls of 1, 5 and 2 seconds
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert figure(lambda: None, rounds=3) == seconds


def test_percentiles_of_nothing_are_not_numbers() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([3, 1, 2], 0.99) == 3
    assert percentile([], 0.5) != percentile([], 0.5)


@pytest.mark.parametrize("figures", [{"value": float("nan")}, {"value": 1.0, "peer": float("inf")}])
def test_a_figure_that_is_no_number_is_refused(figures: dict[str, float]) -> None:
    report = Report("anything")
    with pytest.raises(NotFiniteError, match="wait: "):
        report.add("wait", unit="ms", **figures)
    assert report.results == []


@pytest.mark.parametrize("shape", [SMALL, MIXTURE], ids=lambda shape: shape.name)
def test_shapes_count_what_the_checkpoints_hold(shape: Shape) -> None:
    from safetensors import safe_open

    with checkpoint(shape) as folder, safe_open(f"{folder}/model.safetensors", "pt") as tensors:
        names = list(tensors.keys())
        assert shape.parameters == sum(tensors.get_tensor(name).numel() for name in names)


def test_a_step_reads_all_weights_but_those_of_experts_that_nobody_takes() -> None:
    assert QWEN3_06B.parameters == 596_049_920
    assert QWEN3_06B.decode_bytes(3, 0) == QWEN3_06B.weight_bytes
    expert = 4 * MIXTURE.n_layers * 3 * MIXTURE.hidden_size * MIXTURE.intermediate_size
    assert MIXTURE.decode_bytes(1, 0) == MIXTURE.weight_bytes - (16 - 4) * expert
    assert MIXTURE.decode_bytes(1000, 0) == MIXTURE.weight_bytes
    dense = replace(MIXTURE, experts=0, chosen=0, intermediate_size=4 * MIXTURE.intermediate_size)
    routers = 2 * MIXTURE.n_layers * 16 * MIXTURE.hidden_size
    assert MIXTURE.operations(1, 0, 1) == dense.operations(1, 0, 1) + routers


def test_the_tiny_shape_is_that_of_the_model_that_ships() -> None:
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model

    shipped = json.loads((resolve_model("petiole-tiny") / "config.json").read_text())
    for field, value in {
        "vocab_size": TINY.vocab_size,
        "hidden_size": TINY.hidden_size,
        "intermediate_size": TINY.intermediate_size,
        "num_hidden_layers": TINY.n_layers,
        "num_attention_heads": TINY.n_heads,
        "num_key_value_heads": TINY.n_kv_heads,
        "head_dim": TINY.head_dim,
        "max_position_embeddings": TINY.max_positions,
    }.items():
        assert shipped[field] == value, field


# ---------------------------------------------------------------- record and page


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    report = Report("The engine")
    report.add("prefixes", 3.0, "requests/s", peer=1.0, target=5.0)
    report.add("pipelined", 2.0, "tokens/s", peer=1.0, target=1.0, spread=(1.9, 2.1))
    report.finish(str(tmp_path / "cpu" / "engine.json"))
    return tmp_path


def test_the_page_gives_each_target_its_verdict_and_a_gap_its_cause(recorded: Path) -> None:
    notes = (
        '[engine]\nabout = "Directly."\n[[engine.gap]]\nmatch = "^pre"\ncause = "Nobody shares decode steps."\n'
    )
    (recorded / "notes.toml").write_text(notes)
    page = render.record(recorded)
    assert "### Targets: 1 of 2 met" in page
    assert "**missed** Nobody shares decode steps." in page
    assert "Directly." in page
    assert list(render.unexplained(recorded)) == []


def test_processors_stand_side_by_side(recorded: Path) -> None:
    (recorded / "notes.toml").write_text("")
    assert "side by side" not in render.record(recorded)
    for device, rate in (("cpu", 20.0), ("cpu-xeon", 30.0)):
        batching = Report("A whole load")
        batching.add("8 at once", rate, "tokens/s", peer=10.0)
        batching.finish(str(recorded / device / "batching.json"))
    page = render.record(recorded)
    assert "| batching: 8 at once | 20 tokens/s (2) | 30 tokens/s (3) |" in page
    assert page.index("## On the CPU\n") < page.index("## On the CPU: xeon\n")


def test_a_missed_target_without_a_cause_is_named(recorded: Path) -> None:
    (recorded / "notes.toml").write_text("")
    assert list(render.unexplained(recorded)) == ["cpu/engine: prefixes"]


def test_a_target_that_nothing_measured_is_listed_with_its_reason(recorded: Path) -> None:
    wanted = '[[engine.wanted]]\nmatch = "{}"\nwhat = "idle"\ntarget = "≤ 3 %"\ndevice = "{}"\nreason = "no GPU"\n'
    row = "| engine | idle |   |   | ≤ 3 % | no GPU |"
    (recorded / "notes.toml").write_text(wanted.format("idle", "cpu"))
    assert row in render.record(recorded)
    (recorded / "notes.toml").write_text(wanted.format("idle", "cuda"))
    assert row in render.record(recorded).partition("## On a GPU")[2]
    (recorded / "notes.toml").write_text(wanted.format("pipelined", "cpu"))
    assert row not in render.record(recorded)


def test_what_one_processor_has_measured_no_other_one_has_to(recorded: Path) -> None:
    wanted = '[[recovery.wanted]]\nmatch = "SIGKILL"\nwhat = "a death"\ntarget = "≤ 2 s"\n'
    (recorded / "notes.toml").write_text(wanted)
    assert "| recovery | a death |" in render.record(recorded)
    recovery = Report("A worker dies")
    recovery.add("SIGKILL", 1.3, "s", target=2.0, better="lower")
    recovery.finish(str(recorded / "cpu-z80" / "recovery.json"))
    page = render.record(recorded)
    assert "| recovery | a death |" not in page
    assert "| recovery | SIGKILL | 1.3 s |" in page.partition("## On the CPU: z80")[2]
    assert "side by side" not in page


def test_a_peer_that_was_not_there_is_named_with_its_reason(recorded: Path) -> None:
    report = Report("Peers", absent={"continuous batching": "not available on CPU"})
    report.finish(str(recorded / "cpu" / "models.json"))
    (recorded / "notes.toml").write_text("")
    assert "continuous batching: not available on CPU" in render.record(recorded)


def test_a_record_of_another_machine_says_so(recorded: Path) -> None:
    for name in ("models", "cache"):
        run = json.loads((recorded / "cpu" / "engine.json").read_text())
        run["machine"] = {"cpu": "Z80", "cores": 1, "memory_gib": 0.1}
        (recorded / "cpu" / f"{name}.json").write_text(json.dumps(run))
    (recorded / "notes.toml").write_text("")
    page = render.record(recorded)
    assert "Z80, 1 cores, 0.1 GiB; python" in page
    assert page.count("Recorded elsewhere: ") == 1
    assert "| engine (another machine) | prefixes |" in page


def test_what_is_committed_follows_from_the_committed_results() -> None:
    assert render.RECORD.read_text() == render.record()
    text = render.PAGE.read_text()
    assert render.page(text) == text


def test_the_front_page_has_the_figures_of_the_record() -> None:
    lines = (line.split("|") for line in render.headlines().splitlines())
    rows = {cells[1].strip(): (cells[2].strip(), cells[4].strip()) for cells in reversed([*lines])}
    measured = {what: value for what, (value, _) in rows.items()}
    ratios = {what: ratio for what, (_, ratio) in rows.items()}
    kill, step = (
        "SIGKILL in mid-sentence, to the next delta",
        "Qwen3-8B shape, bf16, a decode step of one sequence",
    )
    gateway = json.loads((render.RESULTS / "cpu-zen4" / "gateway.json").read_text())["results"]
    [added] = [one for one in gateway if one["name"] == "first delta: added, beside LiteLLM's proxy"]
    page = " ".join((render.ROOT / "README.md").read_text().split())
    for said in (
        f"median {measured[f'{kill}, median']}, longest of 50: {measured['the same, the longest of 50']}",
        f"{ratios[step]} times the time to read its bytes (one sequence), {ratios['the same of 64']} (64)",
        f"{float(ratios['Through Celery and Redis, with readers']):.2f} of the rate of the engine alone",
        f"[{float(ratios['32 tasks through Celery']):.0f} times](docs/performance.md)",
        f"adds {added['value']:.2f} ms to the first delta, LiteLLM's proxy {added['peer']:.0f} ms",
    ):
        assert said in page


def test_a_headline_has_a_row_for_each_processor_that_measured_it(recorded: Path) -> None:
    headline = (
        '[[headline]]\nworkload = "engine"\nmatch = "^pre"\nwhat = "Shared prefixes"\nbeside = "none shared"\n'
    )
    (recorded / "notes.toml").write_text(headline)
    assert "| Shared prefixes | 3 requests/s | none shared | 3 |" in render.headlines(recorded)
    assert "1 of 2 targets met" in render.verdicts(recorded)
    assert "- On a GPU: nothing measured." in render.verdicts(recorded)


def test_every_missed_target_has_its_cause() -> None:
    assert list(render.unexplained()) == []


def test_the_tables_of_the_scaling_page_are_those_of_the_results() -> None:
    text = render.SCALING.read_text()
    assert render.scaling(text) == text


def test_a_record_says_what_was_called_and_no_place_of_the_machine() -> None:
    argv = ["/home/me/models.py", "--json", "/data/models.json", "--plots=/data", "--only", "small", "--quick"]
    assert command(argv) == "models.py --only small --quick"
    assert command(["/home/me/bench/gpu/__main__.py", "--only", "8b"]) == "gpu.py --only 8b"


def test_a_record_is_repeated_by_the_module_of_today() -> None:
    assert render.called("batch_many", {"command": "batch.py --only growth"}) == "bench.queue.batch --only growth"
    assert render.called("batch", {"command": "__main__.py batch"}) == "bench.queue.batch"
    printed = re.findall(r"`python -m (bench\.[\w.]+)", render.RECORD.read_text())
    assert [module for module in printed if find_spec(module) is None] == []
