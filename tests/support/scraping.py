"""`petiole metrics` as a process, and what Prometheus reads of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.site import REPOSITORY, Site

Figures = dict[tuple[str, str], float]
"""By sample name, and by the values of its labels, but for the worker and its model."""


@contextmanager
def exporting(site: Site, *arguments: str) -> Iterator[Callable[[], Figures]]:
    with exporter(site, *arguments) as url:
        yield lambda: {
            (sample.name, " ".join(_telling(sample.labels))): sample.value for sample in samples_of(url)
        }


def samples_of(url: str) -> list[Sample]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return [sample for family in families for sample in family.samples]


@contextmanager
def exporter(site: Site, *arguments: str) -> Iterator[str]:
    """Its URL."""
    command = [
        sys.executable,
        "-m",
        "petiole.tasks.commands.cli",
        "metrics",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        *arguments,
    ]
    environment = {**os.environ, **site.environment, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None
        try:
            yield url[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def _telling(labels: dict[str, str]) -> list[str]:
    return [value for label, value in labels.items() if label not in {"worker", "model"}]
