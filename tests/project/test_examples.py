"""Every Python example of README and docs is run as it is printed: here, with a real worker on petiole-tiny and a
gateway, or by the test that is named beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.project.test_links import pages
from tests.support.gateway import Gateway
from tests.support.site import REPOSITORY, Site

BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

HERE: dict[str, tuple[int, ...]] = {
    "README.md": (0, 1),
    "docs/batch.md": (0,),
    "docs/cache.md": (0,),
    "docs/celery.md": (0, 3),
    "docs/constraints.md": (0,),
    "docs/engine.md": (0,),
    "docs/recipes.md": (0, 2),
    "docs/requests.md": (0, 1, 2, 3),
    "docs/streams.md": (1, 0, 2),
    "docs/tools.md": (3,),
    "docs/tutorial.md": (0, 1),
}
"""By page: the examples that one process runs, one after the other."""

ELSEWHERE: dict[str, dict[int, str]] = {
    "docs/batch.md": {1: "tests/gateway/batches/test_jobs.py", 2: "tests/project/test_nightly.py"},
    "docs/celery.md": {1: "tests/support/shop.py", 2: "the module of the worker here"},
    "docs/django.md": dict.fromkeys(range(4), "tests/project/test_pages.py"),
    "docs/embeddings.md": {
        0: "tests/e2e/test_embeddings.py",
        1: "tests/gpu_worker/engine/test_outputs_of_tokens.py",
        2: "tests/e2e/test_scores.py",
        3: "tests/project/test_index.py",
        4: "tests/project/test_index.py",
    },
    "docs/existing-app.md": {
        0: "tests/project/test_wheel.py",
        1: "tests/support/shop.py",
        2: "tests/e2e/test_one_process.py",
    },
    "docs/gateway.md": {
        0: "tests/gateway/test_mounted.py",
        1: "tests/gateway/openai/responses/test_webhooks.py",
        2: "tests/gateway/anthropic/test_messages.py",
    },
    "docs/models.md": {0: "tests/e2e/test_adapters.py"},
    "docs/traces.md": {0: "needs python-json-logger"},
    "docs/recipes.md": {1: "tests/gateway/test_clients.py"},
    "docs/testing.md": dict.fromkeys(range(4), "tests/project/test_pages.py"),
    "docs/tools.md": {
        **dict.fromkeys(range(2), "tests/e2e/test_tiny_tools.py"),
        2: "tests/support/clients/with_openai_agents.py",
    },
    "docs/vision.md": dict.fromkeys(range(4), "tests/e2e/test_vision.py") | {4: "tests/e2e/test_sight.py"},
}
"""By page: who runs the others, or runs the same calls; or what they need."""

BEFORE = {
    "docs/celery.md": """
from celery import Celery
from petiole import app as petiole_app
app = Celery("shop", broker=petiole_app.conf.broker_url, backend=petiole_app.conf.result_backend)
""",
    "docs/streams.md": "import sys, petiole\n",
}
BETWEEN = {
    "README.md": {
        1: """
client = app.test_client()
assert client.post("/jobs", json={"messages": []}).status_code == 400
asked = {"messages": [{"role": "user", "content": "Count from 1 to 5."}]}
print(client.get("/jobs/" + client.post("/jobs", json=asked).json["id"] + "/stream").text)
"""
    },
    "docs/streams.md": {
        0: "sys.argv = ['', result.id, 'unix' + petiole.app.conf.broker_url[12:].partition('?')[0]]"
    },
}
"""What a reader has done before an example, by its number."""


@cache
def examples(page: str) -> list[str]:
    return BLOCK.findall((REPOSITORY / page).read_text())


def test_every_example_is_run() -> None:
    shown = {
        page: set(range(len(found)))
        for page in pages()
        if page[:4] in ("READ", "docs")
        if (found := examples(page))
    }
    assert shown == {page: {*HERE.get(page, ()), *ELSEWHERE.get(page, ())} for page in {*HERE, *ELSEWHERE}}
    named = {by for others in ELSEWHERE.values() for by in others.values() if by.endswith(".py")}
    assert [by for by in named if not (REPOSITORY / by).exists()] == []


@pytest.mark.e2e
@pytest.mark.slow
def test_the_examples_run_as_they_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "llm.py").write_text(examples("docs/celery.md")[2])
    (tmp_path / "in.jsonl").write_text('{"prompt": "Count from 1 to 5."}\n')
    engine = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}
    with Site(tmp_path, **engine) as site:
        site.worker(app="llm")
        with Gateway(tmp_path, PETIOLE_BROKER_URL=site.url) as gateway:
            lines: list[str] = []
            for page, numbers in HERE.items():
                lines += [f"names = {{'__name__': {page!r}}}", f"exec({BEFORE.get(page, '')!r}, names)"]
                for number in numbers:
                    code = examples(page)[number].replace("http://127.0.0.1:8000", gateway.root)
                    code = BETWEEN.get(page, {}).get(number, "") + "\n" + code
                    lines += [
                        f"print({json.dumps(f'== {page} {number}')}, flush=True)",
                        f"exec(compile({code!r}, {f'{page} {number}'!r}, 'exec'), names)",
                    ]
            (tmp_path / "examples.py").write_text("\n".join(lines))
            environment = {**os.environ, **site.environment, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
            ran = subprocess.run(
                [sys.executable, "examples.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert '"name": "Ana"' in ran.stdout.partition("docs/constraints.md")[2]
    assert "39, 40" in ran.stdout.partition("README.md")[2]
