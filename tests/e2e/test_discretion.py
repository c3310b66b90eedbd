"""No text of a user is in a worker's log, at INFO or above."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TimeoutError as StillPendingError

from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest
from tests.e2e.test_bad_input import envelope, put, quarantined
from tests.e2e.test_real_engine import ENGINE
from tests.support.site import Site, Worker, eventually

SECRET = "s3cretw0rd"
WRONG: list[Any] = [
    SECRET,
    f"{SECRET}(",
    [SECRET],
    [[SECRET]],
    {SECRET: SECRET},
    [{SECRET: SECRET}],
    [{"role": SECRET, "content": SECRET}],
    [{"role": "user", "content": {SECRET: SECRET}}],
    [{"role": "user", "content": [{"type": SECRET, "text": SECRET}]}],
    ["", SECRET],
    {"type": SECRET},
    {"type": "object", "properties": {SECRET: {"$ref": SECRET}}},
    {"type": "string", "pattern": f"(?<={SECRET})("},
    f"start: {SECRET}",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("discreet"), PETIOLE_DRAIN_SECONDS=0, **ENGINE) as site:
        yield site


@pytest.fixture(scope="module")
def worker(site: Site) -> Worker:
    return site.worker("-I", "tests.support.telltale_tasks")


def outcome(site: Site, result: Any) -> BaseException | None:
    try:
        site.get(result)
    except StillPendingError:
        raise
    except Exception as error:
        return error
    return None


def test_bad_requests_of_every_kind(site: Site, worker: Worker) -> None:
    valid: dict[str, dict[str, Any]] = {
        "tasks.generate": {"prompt": SECRET},
        "tasks.chat": {"messages": [{"role": "user", "content": SECRET}]},
    }
    sent = [
        site.app.send_task(name, kwargs={"max_tokens": 2, **options, option: wrong})
        for name, options in valid.items()
        for option in (*TASKS[name].request.model_fields, SECRET)
        for wrong in WRONG
    ]
    sent += [
        site.app.send_task(
            name, kwargs={SECRET: SECRET, **dict.fromkeys(TASKS[name].request.model_fields, SECRET)}
        )
        for name in TASKS
    ]
    sent += [site.app.send_task(name, args=[SECRET, SECRET], kwargs={}) for name in TASKS]
    outcomes = [outcome(site, result) for result in sent]
    assert sum(isinstance(error, InvalidRequest) for error in outcomes) > len(sent) / 2
    assert any(SECRET in str(error) for error in outcomes), "results have the values"
    assert "raised" in worker.output
    assert SECRET not in worker.output
    assert "InvalidRequest: temperature" in worker.output, "the log names the option"


def test_bad_messages_of_every_kind(site: Site, worker: Worker) -> None:
    headers = (
        "eta",
        "expires",
        "timelimit",
        "retries",
        "group",
        "root_id",
        "origin",
        "stamps",
        "petiole-affinity",
    )
    headers += ("petiole-sent", "tenant", "stamped_headers", "ignore_result", "replaced_task_nesting", "lang")
    bad: list[Any] = [envelope(**{name: wrong}) for name in headers for wrong in WRONG]
    bad += [
        envelope(body=wrong) for wrong in (*WRONG, SECRET.encode(), [SECRET, SECRET, SECRET], [[], {}, [SECRET]])
    ]
    bad += [
        envelope(body=[[], {"prompt": "x"}, {name: wrong}])
        for name in ("callbacks", "errbacks", "chain", "chord")
        for wrong in WRONG
    ]
    bad += [
        envelope(content_type=SECRET),
        envelope(task=SECRET),
        envelope(task=[SECRET]),
        envelope(compression=SECRET),
    ]
    bad += [{SECRET: SECRET}, SECRET.encode(), [SECRET], {**envelope(), "content-encoding": SECRET}]
    bad += [{**envelope(), "properties": {"body_encoding": SECRET, "delivery_info": {}}}]
    for message in bad:
        put(site, message)
    assert site.get(site.generate("behind them", max_tokens=1))
    eventually(lambda: site.redis.llen("petiole") == site.held() == 0, "all are settled")
    assert SECRET in json.dumps(quarantined(site))
    assert SECRET not in worker.output


def test_tasks_of_the_applications_own(site: Site, worker: Worker) -> None:
    assert site.get(site.app.send_task("indiscreet.answer", args=[SECRET])) == SECRET
    for name in ("fail", "expected", "again"):
        assert SECRET in str(outcome(site, site.app.send_task(f"indiscreet.{name}", args=[SECRET])))
    for name in ("rejected", "ignored"):
        site.app.send_task(f"indiscreet.{name}", args=[SECRET])
    for line in ("fail", "expected", "again", "rejected", "ignored"):
        eventually(lambda line=line: f"Task indiscreet.{line}[" in worker.output, f"{line} is logged")
    eventually(lambda: site.held() == 0, "all are settled")
    assert SECRET not in worker.output
    assert "raise RuntimeError(text) from error\nRuntimeError" in worker.output, "where it was raised is logged"


def test_a_whole_log(site: Site, worker: Worker) -> None:
    """Last, as the worker stops."""
    assert worker.stop() == 0
    assert SECRET not in worker.output
