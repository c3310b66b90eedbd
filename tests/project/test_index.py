"""docs/embeddings.md: the example of an index is run as it is printed, on petiole-tiny-embed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from petiole.tasks.commands.demos.search import PASSAGES
from tests.project.test_examples import examples
from tests.support.site import REPOSITORY, Site

EXAMPLE = 3


def test_an_index_of_a_parquet_file_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"text": list(PASSAGES)}), str(tmp_path / "help.parquet"))
    with Site(tmp_path, PETIOLE_MODEL="petiole-tiny-embed", PETIOLE_DEVICE="cpu") as site:
        site.worker()
        ran = subprocess.run(
            [sys.executable, "-c", examples("docs/embeddings.md")[EXAMPLE]],
            cwd=tmp_path,
            env={**os.environ, "PETIOLE_BROKER_URL": site.url, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr
    assert PASSAGES[0] in ran.stdout, "the passage about refunds is among the three that are found"
