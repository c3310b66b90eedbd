"""What a batch asks of the app."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
from petiole.tasks.app.application import app
from petiole.tasks.submission.batches.exchange import Exchange
print(Exchange(app).task("tasks.generate").name, Exchange(app).lowest_priority)
"""


def test_a_program_that_imports_nothing_but_batches_has_all_tasks() -> None:
    ran = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("tasks.generate 9\n", "")
