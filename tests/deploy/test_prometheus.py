"""A real Prometheus over a real fleet: it takes rules and targets as they are deployed, each panel's query has
figures, and no alert is raised for a fleet without a fault."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from petiole.tasks.wire.keys import SENT_HEADER
from tests.deploy.test_monitoring import HERE, asked, metrics_in, renderer
from tests.support.gateway import Gateway
from tests.support.scraping import exporter, samples_of
from tests.support.site import NO_DISKS, Site, eventually
from tests.support.watched import free_ports

pytestmark = pytest.mark.e2e


class Prometheus:
    """Prometheus in a folder, with these targets by job."""

    def __init__(self, folder: Path, targets: dict[str, str]) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        shutil.copy(HERE / "alerts.yml", folder)
        told = yaml.safe_load((HERE / "prometheus.yml").read_text())
        told["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        assert {job["job_name"] for job in told["scrape_configs"]} == targets.keys()
        for job in told["scrape_configs"]:
            job["static_configs"] = [{"targets": [urllib.parse.urlsplit(targets[job["job_name"]]).netloc]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(told))
        files = f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"
        command = ["prometheus", *files, f"--web.listen-address=127.0.0.1:{port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, path: str, **given: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(given)}") as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def up(self) -> bool:
        try:
            found = self.ask("query", query="up == 1 and count_over_time(up[1m]) > 4")
        except OSError:
            return False
        return len(found["result"]) == 2

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def watched(site: Site) -> Iterator[tuple[Prometheus, set[str]]]:
    """Prometheus over a fleet that has served, and the names of what it scrapes."""
    with exporter(site) as url, Gateway(site.folder, PETIOLE_BROKER_URL=site.url) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key="none")
        [model, *_] = client.models.list()
        client.completions.create(model=model.id, prompt="hello", max_tokens=4)
        row = {"priority": 9, "headers": {SENT_HEADER: time.time()}}
        site.get(site.generate("a row of a batch", max_tokens=2, submission=row))
        metrics = f"{gateway.root}/metrics"
        with closing(Prometheus(site.folder, {"petiole": url, "petiole-gateway": metrics})) as prometheus:
            eventually(prometheus.up, "both targets are scraped")
            yield (
                prometheus,
                {name for of in (url, metrics) for one in samples_of(of) for name in metrics_in(one.name)},
            )


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_each_panel_has_figures_and_no_alert_is_raised(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_DRAIN_SECONDS=0, **NO_DISKS) as site:
        site.worker()
        with watched(site) as (prometheus, scraped):
            empty = []
            for board in renderer().DASHBOARDS.values():
                for panel in board.panels:
                    for query in panel.queries.values():
                        found = prometheus.ask("query", query=asked(query))["result"]
                        if not found and metrics_in(query) <= scraped:
                            empty.append(f"{board.title}, {panel.title}: {query}")
            assert empty == []
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"}
            assert prometheus.ask("alerts")["alerts"] == []
