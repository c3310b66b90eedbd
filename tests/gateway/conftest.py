"""One Redis, one worker on petiole-tiny and one gateway for all tests of a process that do not kill anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from petiole.tasks.fleet import models
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually
from tests.support.tooled import tooled

REAL = {
    "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
    "PETIOLE_DEVICE": "cpu",
    "PETIOLE_NUM_PAGES": 4000,
    "PETIOLE_MAX_NUM_SEQS": 8,
}


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    with Site(folder, **REAL) as site:
        worker = site.start_worker()
        worker.ready()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("gateway")) as site:
        yield site


@pytest.fixture
def own_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """For a gateway that must be the only one."""
    with serving(tmp_path_factory.mktemp("own")) as site:
        yield site


@pytest.fixture(scope="session")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=site.url) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tooled_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """With a model whose template has tools."""
    folder = tmp_path_factory.mktemp("tooled")
    with Site(folder, **{**REAL, "PETIOLE_MODEL": tooled(folder), "PETIOLE_SERVED_NAMES": "tooled"}) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="session")
def tooled_gateway(tooled_site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=tooled_site.url) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tooled_client(tooled_gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tooled_gateway.url, api_key="none", max_retries=0) as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used = {"site", "gateway", "tooled_site"} & set(getattr(item, "fixturenames", ()))
        if used and "gateway" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
