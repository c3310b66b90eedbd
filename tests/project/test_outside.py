"""What a shell has exported reaches no test: what the product reads is dropped, or has been thought of."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.outside import KEPT, dropped, shut_out
from tests.support.site import REPOSITORY

_READ = re.compile(r"""environ(?:\.get\(|\.pop\(|\[)"(\w+)"|getenv\("(\w+)"|"(\w+)" (?:not )?in os\.environ""")


def test_a_setting_of_the_shell_is_dropped_and_a_switch_of_the_tests_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"PETIOLE_BROKER_URL": "redis://fleet/0", "OTEL_TRACES_EXPORTER": "otlp", "COLUMNS": "40"}
    for name, value in {**given, "PETIOLE_FUZZ_SEED": "1", "NO_PROXY": "example.org"}.items():
        monkeypatch.setenv(name, value)
    shut_out()
    assert not given.keys() & os.environ.keys()
    assert os.environ["PETIOLE_FUZZ_SEED"] == "1"
    assert os.environ["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"


def test_each_variable_that_the_product_reads_is_dropped_or_kept() -> None:
    texts = [path.read_text() for path in (REPOSITORY / "petiole").glob("*/**/*.py")]
    read = {next(filter(None, found)) for text in texts for found in _READ.findall(text)}
    assert {name for name in read if not dropped(name)} == KEPT
