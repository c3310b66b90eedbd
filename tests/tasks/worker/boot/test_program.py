"""What a worker says in its log, and how it ends."""

from __future__ import annotations

import gc
import json
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.worker.boot.bootstep import freeze
from petiole.tasks.worker.boot.log_redaction import figures_for_text
from petiole.tasks.worker.boot.program import Connection
from petiole.tasks.worker.output.outcomes import Outcome, at_hand
from petiole.tasks.worker.pool.pool import EnginePool
from tests.support.site import Site, eventually

RESULT = {
    "text": "a secret",
    "token_ids": [1, 2],
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 9, "cached_prompt_tokens": 8, "completion_tokens": 2},
    "timing": {"queue_ms": 1.2, "prefill_ms": 3.0, "ttft_ms": 4.2, "total_ms": 15.0},
    "attempt": 1,
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as site:
        yield site


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost:6379/0", "redis://:**@localhost:6379/0"),
        ("redis://user:secret@localhost:6379/0", "redis://user:**@localhost:6379/0"),
        ("redis+socket:///run/r.sock", "redis+socket:///run/r.sock"),
    ],
)
def test_a_url_shows_a_password_only_where_there_is_one(url: str, shown: str) -> None:
    assert Connection(url).as_uri() == shown


def trace_record(name: str) -> logging.LogRecord:
    facts = {
        "id": "t",
        "name": name,
        "return_value": "a secret",
        "runtime": 0.0,
        "kwargs": "{'prompt': 'a secret'}",
    }
    form = "Task %(name)s[%(id)s] succeeded in %(runtime)ss: %(return_value)s"
    record = logging.LogRecord("celery.app.trace", logging.INFO, "", 0, form, (facts,), None)
    record.data = facts  # where Celery's log puts it, by `extra`
    return record


@pytest.mark.parametrize("name", ["tasks.generate", "a name of its own"])
def test_a_generation_is_logged_with_its_figures_and_without_its_text(name: str) -> None:
    record = trace_record(name)
    with at_hand("t", Outcome(RESULT)):
        assert figures_for_text(record)
    assert record.getMessage() == (
        f"Task {name}[t] succeeded in 0.015s: 2 tokens (stop), TTFT 4 ms, waited 1 ms, prompt 9 tokens, 8 cached"
    )
    figures = {"finish_reason": "stop", "attempt": 1, **RESULT["usage"], **RESULT["timing"]}  # type: ignore[dict-item]
    assert record.data == {"id": "t", "name": name, "runtime": 0.015, **figures}  # type: ignore[attr-defined]


def test_a_later_attempt_is_told_by_its_number() -> None:
    record = trace_record("tasks.generate")
    with at_hand("t", Outcome({**RESULT, "attempt": 3})):
        assert figures_for_text(record)
    assert record.getMessage().endswith("8 cached, attempt 3")


def test_an_eager_generation_inside_another_task_is_logged_without_its_text() -> None:
    record = trace_record("tasks.generate")
    assert figures_for_text(record)
    assert record.getMessage() == "Task tasks.generate[t] succeeded in 0.0s: a generation"
    assert "secret" not in str(record.data)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("value", "shown"), [("a secret", "a result"), ("None", "None"), ("-1.5", "-1.5")])
def test_other_tasks_are_logged_without_text_in_their_results(value: str, shown: str) -> None:
    record = trace_record("mine.add")
    record.args["return_value"] = value  # type: ignore[call-overload, index]
    assert figures_for_text(record)
    assert record.getMessage().endswith(f"succeeded in 0.0s: {shown}")
    assert record.data == {"id": "t", "name": "mine.add", "return_value": shown, "runtime": 0.0}  # type: ignore[attr-defined]


JSON_LOG = """
import json, logging, sys
from celery.signals import setup_logging

class Json(logging.Formatter):
    def format(self, record):
        facts = {"level": record.levelname, "message": record.getMessage(), **getattr(record, "data", {})}
        return json.dumps(facts, default=str)

@setup_logging.connect
def configure(loglevel=None, **_):
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json())
    logging.basicConfig(level=loglevel, handlers=[handler])
"""


@pytest.mark.e2e
def test_a_log_in_json_has_figures_and_neither_prompts_nor_texts(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json_log.py").write_text(JSON_LOG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = site.worker("-I", "json_log")
    text = site.get(site.generate("a secret", max_tokens=7))["text"]
    with pytest.raises(InvalidRequest):
        site.get(site.app.send_task("tasks.generate", kwargs={"prompt": "a secret", "max_tokens": -1}))
    eventually(lambda: "raised expected" in worker.output, "it is logged")
    lines = [json.loads(line) for line in worker.output.splitlines() if line.startswith("{")]
    assert [line["completion_tokens"] for line in lines if "succeeded in" in line["message"]] == [7]
    assert "a secret" not in worker.output
    assert text not in worker.output


@pytest.mark.e2e
def test_a_redis_that_comes_back_leaves_a_line_for_each_try_and_no_traceback(site: Site) -> None:
    worker = site.worker(gossip=True)
    site.server.kill()
    eventually(lambda: worker.output.count("trying again in") >= 2, "it has tried twice")
    site.server.start()
    eventually(lambda: worker.output.count("Connected to") == 2, "it is back")
    assert site.get(site.generate(max_tokens=2))["finish_reason"] == "length"
    assert "Traceback" not in worker.output
    assert "Warning:" not in worker.output


@pytest.mark.e2e
def test_one_interrupt_is_a_warm_shutdown_that_succeeds(site: Site) -> None:
    worker = site.worker(PETIOLE_FAKE_STEP_MS=20)
    result = site.generate("long", max_tokens=200)  # for seconds, of which the event loop sleeps some
    site.streaming(result)
    worker.signal(signal.SIGINT)
    assert worker.ended() == 0
    assert site.get(result)["usage"]["completion_tokens"] == 200
    assert "finishing 1 task," in worker.output
    assert "back after" not in worker.output
    assert f"[{result.id}] succeeded in " in worker.output


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("setting", "value", "limit"),
    [
        ("PETIOLE_PAGE_SIZE", 7, r"must be 1 with prefix_cache=radix \(PETIOLE_PREFIX_CACHE\)"),
        ("PETIOLE_MAX_NUM_SEQS", 10**9, r"must be at most \d+ in \d+ bytes \(\d+ each\)"),
    ],
)
def test_a_setting_that_only_the_engine_can_refuse_is_one_line_and_status_2(
    site: Site, setting: str, value: int, limit: str
) -> None:
    engine = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}
    worker = site.start_worker(**engine, **{setting: value})
    assert worker.ended() == 2
    assert re.search(f"{setting}: {limit}, got {value}", worker.output)
    assert "Traceback" not in worker.output


@pytest.mark.e2e
def test_another_pool_is_one_line_and_status_2(site: Site) -> None:
    worker = site.start_worker("-P", "solo")
    assert worker.ended() == 2
    assert "need its own pool, not celery.concurrency.solo: leave -P (--pool) out" in worker.output
    assert "Traceback" not in worker.output


@pytest.mark.e2e
@pytest.mark.parametrize("backend", ["rpc://", "disabled://"])
def test_a_result_backend_that_others_cannot_read_is_one_line_and_status_2(site: Site, backend: str) -> None:
    worker = site.start_worker("--", f"result.backend={backend}")
    assert worker.ended() == 2
    line = f"result_backend: must keep results where other processes find them, got {backend}"
    assert line in worker.output
    assert "Traceback" not in worker.output


def test_an_app_of_ones_own_cannot_have_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    """Its worker would run generations without leases, and lose them when it dies."""
    with pytest.raises(WorkerShutdown) as caught:
        EnginePool(app=Celery("shop", set_as_current=False)).on_start()
    assert caught.value.args == (2,)
    assert "serves its own app, not 'shop'" in caplog.text


def test_what_is_loaded_is_not_looked_through_by_every_garbage_collection() -> None:
    """A full collection of a worker takes 100 ms, in which nothing else runs."""
    before, threshold = gc.get_freeze_count(), gc.get_threshold()
    loaded: list[list[int]] = [[] for _ in range(10_000)]
    try:
        freeze()
        assert gc.get_freeze_count() >= before + len(loaded)
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
