"""A card's own figures, from a driver that is pretended: no card is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.worker.reports import card
from tests.support.site import REPOSITORY

REPORT = """
import json, logging
logging.basicConfig(level="ERROR")
from petiole.tasks.worker.reports.card import Card
found = Card("GPU-1")
print(json.dumps([found.report(), found.report()]))
try:
    Card("GPU-2")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_figures_of_a_card(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a compiler makes the pretended driver")
    library, source = tmp_path / "libnvidia-ml.so.1", REPOSITORY / "tests" / "support" / "nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        [sys.executable, "-c", REPORT], env=environment, capture_output=True, text=True, check=True
    )
    shown, refused = ran.stdout.splitlines()
    figures = {
        "card_memory_bytes": 40,
        "card_power_w": 351.5,
        "card_temperature_c": 61,
        "card_ecc_errors": None,
        "card_xids": 2,
    }
    assert json.loads(shown) == [figures, figures]
    assert refused.startswith("NVMLError")
    assert [line.split(":")[2] for line in ran.stderr.splitlines()] == [
        "the card reports Xid 79",
        "the card reports Xid 31",
    ]
    WorkerReport(worker="w", **figures)


def test_a_worker_without_a_card_has_no_figures() -> None:
    assert card.find("cpu") is None
    assert {*card.FIGURES} <= WorkerReport.model_fields.keys()
    assert all(getattr(WorkerReport(worker="w"), name) is None for name in card.FIGURES)
