"""What holds for all tests: no property fails because a machine is slow, a failure says how to repeat it, long
trials have their marker, what takes long begins first, and the end of a run says what was skipped and why.

Continuous integration (`CI` is set) tries the same examples each time; everyone else tries new ones.

Without CUDA's driver Triton interprets the kernels. It settles that when it is imported, by transformers perhaps.

A process that shares the cores with others computes on one thread, unless a test asks for more, and threads that
wait do not spin. OpenMP settles both when torch is imported.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import trials
from tests.support.outside import shut_out
from tests.support.trials import is_slow

shut_out()
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "100")

os.environ.setdefault("TRITON_INTERPRET", "1")
with suppress(OSError):
    ctypes.CDLL("libcuda.so.1")
    del os.environ["TRITON_INTERPRET"]


settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    trials.short = config.option.markexpr == "not slow"
    trials.forks = config.option.markexpr in ("not slow", "slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage collection looks through the libraries and 8,000 tests again. It would take half a second each
    time, and some tests collect twenty times."""
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_unconfigure() -> None:
    """At its end a process tells what libraries in C have not released. One of xdist's only has to end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped and why, a line a reason."""
    reasons = Counter(
        report.longrepr[-1].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")
    )
    if reasons:
        terminalreporter.section("skipped, and why")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")


LONG = (
    "tests/chaos",
    "tests/project/test_wheel.py",
    "tests/tasks/test_celery_versions.py",
    "tests/training",
    "tests/fuzz",
    "tests/e2e",
)
"""What begins first, in this order. Most of it waits, so the linters and what computes may run beside it. And no
process of `make test-all` is left alone with minutes of it when the others have ended."""

APART = (
    "tests/chaos/test_no_false_death.py",
    "tests/e2e/test_adapters.py",
    "tests/e2e/test_completing.py",
    "tests/e2e/test_exporter.py",
    "tests/e2e/test_foreign_tasks.py",
    "tests/e2e/test_limits.py",
    "tests/e2e/test_recovery.py",
    "tests/e2e/test_sentinel.py",
    "tests/e2e/test_steering.py",
    "tests/e2e/test_stop_while_loading.py",
)
"""Files whose tests share no server and no worker: each test may run in another process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.nodeid.partition("::")[0], item.name):
            item.add_marker(pytest.mark.slow)

    def rank(item: pytest.Item) -> int:
        return next((at for at, path in enumerate(LONG) if item.nodeid.startswith(path)), len(LONG))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but what is `APART`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in APART else file

    return Scheduling(config, log)
