"""A benchmark in parts keeps what it has measured, whatever becomes of the part that runs."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import steps as gpu
from bench.gpu.card import Card
from bench.gpu.serving import peer_rate
from bench.harness import parts, report
from bench.harness.parts import Parts, apart, beside, failed, read
from bench.harness.report import Report


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """card(name, commit): what the next figures are measured on."""

    def use(name: str, commit: str = "abc") -> None:
        monkeypatch.setattr(parts, "card_name", lambda: name)
        monkeypatch.setattr(report, "machine", lambda: {"gpu": name})
        for module in (parts, report):
            monkeypatch.setattr(module, "commit", lambda: commit)

    use("NVIDIA H200")
    return use


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "new folder" / "gpu.json")


def measured(path: str, part: str, *names: str, without: tuple[str, ...] = (), variant: str = "") -> Parts:
    report = Parts("a card", path=path, part=part, variant=variant)
    report.resume((part, *without))
    for name in names:
        report.add(name, 1.0, "ms", floor=0.5, target=3.0, better="lower", note=name)
    return report


def names(report: Report) -> list[str]:
    return [result.name for result in report.results]


def test_a_figure_is_in_the_file_as_soon_as_it_is_there(path: str, card: Callable[..., None]) -> None:
    measured(path, "8b", "step")  # and killed, before the part has ended
    assert [r["name"] for r in read(path)["results"]] == ["step"]
    resumed = measured(path, "sampling", "draw")
    assert [(r.name, r.ratio, r.note) for r in resumed.results] == [("step", 2.0, "step"), ("draw", 2.0, "draw")]


def test_parts_that_are_not_measured_again_stay(path: str, card: Callable[..., None]) -> None:
    measured(path, "8b", "step", "prefill")
    failed(path, "vllm", "not installed")
    measured(path, "sampling", "draw")
    again = measured(path, "8b", "step")
    assert names(again) == ["draw", "step"]
    assert again.absent == {"vllm": "not installed"}
    assert measured(path, "ceilings", without=("8b", "vllm")).absent == {}


def test_a_variant_of_the_same_parts_stays_beside_them(path: str, card: Callable[..., None]) -> None:
    measured(path, "ceilings", "copy")
    measured(path, "8b", "step")
    measured(path, "ceilings", "copy", without=("8b",), variant=", eager")
    eager = measured(path, "8b", "step", variant=", eager")
    assert names(eager) == ["copy", "step", "copy, eager", "step, eager"]
    assert [result.name for result in eager.new] == ["step, eager"]
    assert eager.value("copy") == 1.0
    assert names(measured(path, "8b", "step")) == ["copy", "copy, eager", "step, eager", "step"]


@pytest.mark.parametrize("now", [("NVIDIA H100 80GB HBM3", "abc"), ("NVIDIA H200", "def")])
def test_figures_of_another_card_or_commit_are_kept_beside(
    now: tuple[str, str], path: str, card: Callable[..., None]
) -> None:
    measured(path, "8b", "step")
    card(*now)
    assert names(measured(path, "sampling", "draw")) == ["draw"]
    first, second = Path(path).with_stem("gpu-NVIDIA-H200-abc"), beside(path, now[1], now[0])
    assert [r["name"] for r in read(str(first))["results"]] == ["step"]
    card("NVIDIA H200")
    assert names(measured(path, "layers", "layer")) == ["step", "layer"]
    assert [r["name"] for r in read(second)["results"]] == ["draw"]
    card(*now)
    assert names(measured(path, "idle", "wait")) == ["draw", "wait"]
    assert [r["name"] for r in read(str(first))["results"]] == ["step", "layer"]


def test_a_target_is_judged_on_the_card_it_was_set_for(path: str, card: Callable[..., None]) -> None:
    report = Parts("figures", path=path, part="workload")
    for name, met in (("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", None), ("NVIDIA GH200 480GB", None)):
        card(name)
        result = report.add("tokens", 3.0, "1/s", target=2.0, card="H200", note="all")
        assert result.met is met
        assert result.note == ("all" if met else "all; an H200's target is 2")
        assert report.add("step", 3.0, "ms", floor=2.0, target=2.0, better="lower").met is True


def test_half_a_file_counts_as_none(path: str, card: Callable[..., None]) -> None:
    measured(path, "8b", "step")
    Path(path).write_text(Path(path).read_text()[:100])
    assert names(measured(path, "sampling", "draw")) == ["draw"]


def test_seconds_are_those_of_all_parts(path: str, card: Callable[..., None]) -> None:
    measured(path, "8b", "step")
    Path(path).write_text(json.dumps(read(path) | {"seconds": 100.0}))
    assert measured(path, "sampling", "draw").as_json()["seconds"] >= 100


def test_a_part_reads_the_ceilings_and_the_file_says_what_failed(
    path: str, card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(gpu, "matrix_rate", lambda: 8e14)

    def part(report: Report, card: Card) -> None:
        report.add("share", card.bandwidth / card.rate, "")
        raise RuntimeError("the device broke")

    monkeypatch.setitem(gpu.PARTS, "8b", part)
    gpu.measure("ceilings", path, ("ceilings", "8b"))
    with pytest.raises(RuntimeError):
        gpu.measure("8b", path, ("8b",))
    failed(path, "8b", "failed with status 1")
    record = read(path)
    assert [r["name"] for r in record["results"]] == [gpu.BANDWIDTH, gpu.RATE, "share"]
    assert record["results"][-1]["value"] == 4e12 / 8e14
    assert record["absent"] == {"8b": "failed with status 1"}


def test_only_what_is_missing_is_measured_and_only_while_there_is_time(
    path: str, card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    answers = {"sampling": "stopped after 9 s"}

    def apart(limit_s: float, work: object, part: str, *rest: object) -> str:
        begun.append(part)
        measured(path, part, part)
        return answers.get(part, "")

    monkeypatch.setattr(gpu, "apart", apart)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    only = [word for part in ("8b", "sampling", "idle") for word in ("--only", part)]
    with pytest.raises(SystemExit, match="failed: sampling"):
        gpu.main([*only, "--json", path])
    assert begun == ["ceilings", "8b", "sampling", "idle"]
    begun.clear()
    answers.clear()
    gpu.main([*only, "--json", path, "--missing"])
    assert begun == ["ceilings", "sampling"]
    begun.clear()
    with pytest.raises(SystemExit, match="failed: ceilings"):
        gpu.main([*only, "--json", path, "--within", "0"])
    assert begun == []
    assert read(path)["absent"] == {"ceilings": "not begun: the 0 s are over"}


def test_a_part_that_nobody_ends_is_missing(
    path: str, card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command was stopped, so that nobody could write down why."""

    def part(report: Report, card: Card) -> None:
        report.add("step", 1.0, "ms")
        assert not parts.measured(path, "8b")

    monkeypatch.setitem(gpu.PARTS, "8b", part)
    measured(path, "ceilings", gpu.BANDWIDTH, gpu.RATE)
    gpu.measure("8b", path, ("8b",))
    assert parts.measured(path, "8b")
    assert read(path)["absent"] == {}


def loud() -> None:
    logging.getLogger("petiole.gpu_worker.runtime.cuda.graphs").info("steps of 1 positions: 1 ms")
    print(gc.get_freeze_count() > 0)


def test_a_part_logs_what_was_chosen_and_leaves_what_is_loaded_to_no_collection(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert apart(60, loud) == ""
    assert capfd.readouterr().out.splitlines() == ["steps of 1 positions: 1 ms", "True"]


def die(status: int) -> None:
    os._exit(status)


def test_a_part_has_a_process_and_a_limit_of_its_own() -> None:
    assert apart(60, os.getpid) == ""
    assert apart(60, die, 7) == "failed with status 7"
    assert apart(60, os.kill, 0, "no signal") == "failed with status 1"
    assert apart(0.2, time.sleep, 600) == "stopped after 0.2 s"


def be_asked() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_part_that_is_stopped_says_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    assert apart(60, be_asked) == ""
    assert "in be_asked" in capfd.readouterr().err


def test_a_peer_that_failed_is_no_figure() -> None:
    good = SimpleNamespace(generated_tokens=[1, 2], error=None, lifespan=(1.0, 3.0))
    bad = SimpleNamespace(generated_tokens=[], error="out of memory", lifespan=(1.0, 5.0))
    assert peer_rate([good, good], 4) == 2.0
    with pytest.raises(RuntimeError, match=r"2 of 4 tokens.*out of memory"):
        peer_rate([good, bad], 4)
