"""`petiole metrics` as a process, and what Prometheus reads of it."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support import nursery
from tests.support.site import REPOSITORY, Site, eventually

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
    command = ["petiole.tasks.commands.cli", "metrics", "--host", "127.0.0.1", "--port", "0", *arguments]
    with TemporaryFile() as output:
        process = nursery.start(command, nursery.surroundings(**site.environment), REPOSITORY, output)

        def url() -> re.Match[str] | None:
            said = os.pread(output.fileno(), 2**16, 0).decode()
            assert process.poll() is None, said
            return re.search(r"http://\S+(?=\n)", said)

        try:
            yield eventually(url, "it says where it is")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def _telling(labels: dict[str, str]) -> list[str]:
    return [value for label, value in labels.items() if label not in {"worker", "model"}]
