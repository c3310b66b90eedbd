"""openai-python's own tests of its methods against a real gateway: each answer has the type that the SDK declares.
`make openai-tests` fetches them and says where: PETIOLE_OPENAI_PYTHON."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.fleet import models
from tests.engines.conftest import SMALL, VLLM
from tests.gateway.conftest import REAL
from tests.support.gateway import Gateway
from tests.support.site import REPOSITORY, Site, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WHERE = os.environ.get("PETIOLE_OPENAI_PYTHON")
FILES = [
    "chat", "conversations", "responses", "test_batches.py", "test_completions.py", "test_conversations.py",
    "test_files.py", "test_models.py", "test_responses.py",
]  # fmt: skip
"""Of tests/api_resources. The others are of what no gateway serves: administration, assistants, audio, containers,
evaluations, fine-tuning, images, moderations, realtime, skills, uploads, vector stores, videos. Embeddings need a
model of texts, and have tests of their own."""


OF_VLLM = {"PETIOLE_ENGINE": "vllm", "PETIOLE_ENGINE_FACTORY": "", "PETIOLE_VLLM_ARGS": SMALL}
ENGINES = [
    pytest.param({}, id="petiole"),
    pytest.param(OF_VLLM, id="vllm", marks=pytest.mark.skipif(not VLLM, reason="PETIOLE_VLLM_PYTHON is not set")),
]


@pytest.mark.skipif(WHERE is None, reason="needs openai-python's tests: make openai-tests")
@pytest.mark.parametrize("engine", ENGINES)
def test_each_method_gets_an_answer_of_its_type(tmp_path: Path, engine: dict[str, Any]) -> None:
    folder = Path(str(WHERE))
    files: dict[str, Any] = {"PETIOLE_GATEWAY_FILES": tmp_path / "files"}
    known: dict[str, Any] = {**REAL, **files, **engine}
    with Site(tmp_path, **known) as site:
        site.start_worker().ready(900)
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        with Gateway(tmp_path, PETIOLE_BROKER_URL=site.url, **files) as gateway:
            paths = os.pathsep.join([str(REPOSITORY / "tests" / "support" / "clients"), str(folder)])
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "openai_seeds", "-p", "no:cacheprovider",
                 "-q", "-rfs", *(f"tests/api_resources/{name}" for name in FILES)],
                cwd=folder, env={**os.environ, "TEST_API_BASE_URL": gateway.url, "PYTHONPATH": paths},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    assert re.search(r"\d{3} passed", run.stdout)
