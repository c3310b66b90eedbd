"""`petiole.testing` as applications use it: in processes of their own, because Celery keeps its connections."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petiole.testing import Answer, FakeWorker
from petiole.testing.script import answer_of
from tests.support.site import REPOSITORY


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PETIOLE_")}
    return subprocess.run(
        [sys.executable, *command],
        env={**kept, "PYTHONPATH": str(REPOSITORY), "PETIOLE_BROKER_URL": "redis://127.0.0.1:1/0"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["faked.py", "django_faked.py"])
def test_the_tests_of_an_application(tmp_path: Path, name: str) -> None:
    tests = REPOSITORY / "tests" / "support" / name
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "petiole.testing", "--noconftest")
    ran = run(tmp_path, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", str(tmp_path), str(tests))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def wrong(made: Any) -> Any:
    return made  # for a type checker


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Answer(wrong(["One, ", "two."])), r"each piece must be a text, got \['One, ', 'two.'\]"),
        (lambda: Answer("One", finish_reason=wrong("end")), "finish_reason must be one of stop, .*, got 'end'"),
        (lambda: Answer(error=wrong("no room")), "error must be an exception, got 'no room'"),
        (lambda: FakeWorker().answers(wrong(["One, "])), r"must be a text, an Answer, .*, got \['One, '\]"),
        (lambda: answer_of(wrong(lambda _: 1), wrong(None)), "must be a text, an Answer, .*, got 1"),
    ],
)
def test_a_wrong_answer_is_refused_where_it_is_written(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


EAGER = """
import warnings
from celery import Celery
shop = Celery("shop")
shop.conf.task_always_eager = True
from petiole import generate
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        generate.delay(prompt="a", retry=False)
    except Exception as error:
        print(type(error).__name__)
print(*(warning.message for warning in caught))
"""


def test_a_test_whose_own_app_alone_is_eager_is_told(tmp_path: Path) -> None:
    ran = run(tmp_path, "-c", EAGER)
    assert ran.stdout.startswith("Unavailable\n"), ran.stdout + ran.stderr
    assert "task_always_eager of the app 'shop' does not cover Petiole's tasks" in ran.stdout


def test_a_process_that_has_connected_elsewhere_is_refused(tmp_path: Path) -> None:
    connected = "from petiole import celery_app, testing; celery_app.pool\nwith testing.fake(): pass"
    ran = run(tmp_path, "-c", connected)
    assert "Celery is connected to another broker" in ran.stderr
