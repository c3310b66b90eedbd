"""The parts of `bench.gpu` about pictures run from end to end, here on a CPU with the shape of the small model."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import Image

from bench.gpu import vision as gpu_vision
from bench.gpu.card import Card
from bench.gpu.vision import PUBLISHED, SIZES, UNIQUE, chart, deep_queue
from bench.harness.checkpoints.moondream import FULL_BF16, Seeing
from bench.harness.report import Report
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from tests.support.pictures import MODEL

CARD = Card(bandwidth=1e10, rate=1e11)


@pytest.fixture(scope="module")
def tiny() -> Seeing:
    raw = json.loads((resolve_model(MODEL) / "config.json").read_text())
    return Seeing(MODEL, "float32", {**raw, "torch_dtype": "float32"})


def test_a_queue_of_questions_is_judged_by_what_is_published(tiny: Seeing) -> None:
    report = Report("")
    published = {2: {3: 1e-6, 5: 1e9}}
    gpu_vision.questions(report, CARD, tiny, "cpu", published, each=6)
    assert [(r.unit, r.met) for r in report.results] == [("requests/s", True), ("requests/s", False)]


def test_pictures_that_are_asked_about_once_stand_beside_their_arithmetic(tiny: Seeing) -> None:
    report, profiled = Report(""), list[str]()

    def profile(report: Report, name: str, work: Callable[[], object], steps: int) -> None:
        work()
        profiled.append(name)

    gpu_vision.images(report, CARD, tiny, "cpu", n=3, profile=profile)
    assert [(r.unit, r.target) for r in report.results] == [("ms", None), ("images/s", None)]
    assert all(r.floor is not None for r in report.results)
    assert profiled == [f"{MODEL}, an encode"]


def test_five_questions_about_three_pictures_in_a_row() -> None:
    asked = list(deep_queue(10, 3, seed=0))
    pictures = [request.images[0] for request in asked]
    runs = [pictures.count(picture) for picture in dict.fromkeys(pictures)]
    assert runs == [2, 2, 1] * 2
    sizes = {Image.open(BytesIO(picture)).size for picture in pictures}  # type: ignore[arg-type]
    assert sizes == set(SIZES)
    texts = [request.skill.options["question"] for request in asked if request.skill]
    assert len(set(zip(pictures, texts, strict=True))) == 10
    assert chart(1, UNIQUE) != chart(2, UNIQUE)


def test_operations_are_those_of_the_architecture() -> None:
    assert FULL_BF16.encode_operations(9) == pytest.approx(6.0e12, rel=0.03)
    assert FULL_BF16.encode_operations(10) - FULL_BF16.encode_operations(9) == pytest.approx(0.67e12, rel=0.02)
    assert FULL_BF16.prefill_operations(20) == pytest.approx(1.9e12, rel=0.05)
    assert {n: set(targets) for n, targets in PUBLISHED.items()} == {n: {3, 30} for n in (1, 4, 16, 64)}
