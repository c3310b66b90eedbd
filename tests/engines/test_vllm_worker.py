"""Workers whose engine is vLLM's child: what they lose, nothing; what a stream has twice, nothing. They have no
torch."""

from __future__ import annotations

import base64
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.errors import InvalidRequest, ModelChanged
from petiole.tasks.fleet import models, reports
from tests.engines.conftest import SMALL, UNTORCHED, VLLM
from tests.support import seeing
from tests.support.site import Site, Worker, eventually
from tests.support.stand_in.vllm import token

pytestmark = pytest.mark.e2e

LONG = 300
"""Tokens of a stream: two workers need two minutes for 200 of them, so deaths meet streams."""


def expected(prompt: list[int], n: int) -> list[int]:
    before = list(prompt)
    for _ in range(n):
        before.append(token(before))
    return before[len(prompt) :]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: str) -> Iterator[Site]:
    monkeypatch.setenv("PYTHONPATH", str(UNTORCHED))
    engine = {"PETIOLE_ENGINE": "vllm", "PETIOLE_ENGINE_FACTORY": "", "PETIOLE_VLLM_PYTHON": interpreter}
    more: dict[str, Any] = {"PETIOLE_MODEL": "petiole-tiny", "PETIOLE_MAX_ATTEMPTS": 100, "STAND_IN_STEP_MS": 20}
    with Site(tmp_path, **engine, **more) as site:
        yield site


def child_of(worker: Worker) -> int:
    """The process of the worker's child."""
    children = Path(f"/proc/{worker.process.pid}/task").glob("*/children")
    found = [int(pid) for path in children for pid in path.read_text().split()]
    return next(pid for pid in found if b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_a_worker_names_its_engine_and_refuses_by_name(site: Site) -> None:
    site.worker()
    prompt = [1, 2, 3]
    value = site.get(site.generate(prompt, max_tokens=8, temperature=0, ignore_eos=True))
    assert value["token_ids"] == expected(prompt, 8)
    eventually(lambda: reports.workers(site.redis), "a report")
    assert [report.kernels for report in reports.workers(site.redis)] == ["vllm 0.0"]
    eventually(lambda: models.models(site.redis), "the facts of its model")
    assert [facts.engine for facts in models.models(site.redis)] == ["vllm 0.0"]
    with pytest.raises(InvalidRequest, match="temperature"):
        site.get(site.generate(prompt, temperature=3))


def test_a_worker_without_torch_passes_pictures_on(site: Site, tmp_path: Path) -> None:
    model = tmp_path / "model"
    seeing.write_seeing(model, "qwen3-vl")
    site.worker(PETIOLE_MODEL=model)
    files = [base64.b64encode(seeing.as_file(seeing.drawn_picture(64, 48, seed))).decode() for seed in (1, 2)]
    answers = []
    for file in files:
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}]
        options = {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "ignore_eos": True}
        answers.append(site.get(site.app.send_task("tasks.chat", kwargs=options))["token_ids"])
    assert answers[0] != answers[1]


def test_a_worker_whose_child_is_killed_ends_and_another_continues_its_tasks(site: Site) -> None:
    first = site.worker()
    result = site.generate([4, 5], max_tokens=1500, temperature=0, ignore_eos=True)
    site.streaming(result, 5)
    second = site.worker()
    os.kill(child_of(first), signal.SIGKILL)
    value = site.get(result)
    assert value["token_ids"] == site.tokens(result) == expected([4, 5], 1500)
    assert first.process.wait(30) == 70
    assert "vLLM has ended" in first.output
    assert second.process.poll() is None


def test_a_worker_of_another_engine_on_the_queue_never_continues_a_task(site: Site) -> None:
    first = site.worker()
    begun = site.generate([4, 5], max_tokens=1500, temperature=0, ignore_eos=True)
    site.streaming(begun, 5)
    site.worker(PETIOLE_ENGINE="petiole", PETIOLE_ENGINE_FACTORY="tests.support.fake_engine:FakeEngine")
    first.kill()
    with pytest.raises(ModelChanged):
        site.get(begun)
    assert len(site.get(site.generate([4, 5], max_tokens=8, temperature=0, ignore_eos=True))["token_ids"]) == 8


@pytest.mark.slow
def test_200_streams_and_every_kind_of_death(site: Site) -> None:
    seed = int(os.environ.get("PETIOLE_CHAOS_SEED", "0")) or random.randrange(1, 2**31)
    print(f"PETIOLE_CHAOS_SEED={seed}")
    chance, workers = random.Random(seed), [site.worker() for _ in range(2)]
    prompts = [[k + 1, chance.randrange(500)] for k in range(200)]
    results = [site.generate(prompt, max_tokens=LONG, temperature=0, ignore_eos=True) for prompt in prompts]
    for kind in ("worker", "child", "worker", "child"):
        enough = min(sum(result.ready() for result in results) + 10, len(results))
        eventually(lambda enough=enough: sum(one.ready() for one in results) >= enough, "some more ended")
        place = chance.randrange(2)
        with suppress(ProcessLookupError, StopIteration):
            workers[place].kill() if kind == "worker" else os.kill(child_of(workers[place]), signal.SIGKILL)
        workers[place] = site.worker()
    values = [site.get(result) for result in results]
    for prompt, result, value in zip(prompts, results, values, strict=True):
        assert value["token_ids"] == site.tokens(result) == expected(prompt, LONG)
    assert max(value["attempt"] for value in values) > 1, "no death met a stream"


@pytest.mark.slow
@pytest.mark.skipif(not VLLM, reason="PETIOLE_VLLM_PYTHON names no interpreter with vLLM")
def test_200_streams_of_vllm_itself(site: Site) -> None:
    chosen = {"PETIOLE_VLLM_PYTHON": VLLM, "PETIOLE_VLLM_ARGS": SMALL}
    workers = [worker.ready(900) for worker in [site.start_worker(**chosen) for _ in range(2)]]
    asked = [{"prompt": [k + 1, 7], "max_tokens": LONG, "temperature": 0, "ignore_eos": True} for k in range(200)]
    results = [site.generate(**options) for options in asked]
    for kill in (workers[0].kill, lambda: os.kill(child_of(workers[1]), signal.SIGKILL)):
        enough = min(sum(result.ready() for result in results) + 20, len(results))
        eventually(lambda enough=enough: sum(one.ready() for one in results) >= enough, "some more ended", 300)
        kill()
        site.start_worker(**chosen)
    values = [site.get(result, 1800) for result in results]
    assert [value["token_ids"] for value in values] == [site.tokens(result) for result in results]
    again = [k for k, value in enumerate(values) if value["attempt"] > 1]
    assert again, "no death met a stream"
    undisturbed = [site.get(result, 600) for result in [site.generate(**asked[k]) for k in again]]
    assert [value["token_ids"] for value in undisturbed] == [values[k]["token_ids"] for k in again]
