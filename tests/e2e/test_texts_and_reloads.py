"""`petiole reload` among tasks of texts: each is answered by one model, or fails with ModelChanged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.errors import ModelChanged
from petiole.tasks.fleet import control
from tests.support.site import REPOSITORY, Site, eventually
from tests.support.text_models import write_qwen3_embedder

TEXTS = [f"text number {k}" for k in range(12)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for folder in folders:
        write_qwen3_embedder(folder, folder.name)
    return folders


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Iterator[Site]:
    more: dict[str, Any] = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_MODEL": folders[0],
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_MAX_NUM_SEQS": 4,
        "PETIOLE_NUM_THREADS": 1,
    }
    with Site(tmp_path_factory.mktemp("site"), **more) as site:
        site.worker()
        yield site


def embed(site: Site, texts: list[str]) -> Any:
    return site.app.signature("tasks.embed", kwargs={"texts": texts}).apply_async()


def logged(site: Site, task: Any) -> list[str]:
    return [vector for delta in site.log(task) for vector in delta.get("vectors") or ()]


def reload(site: Site, folder: Path) -> None:
    control.reload(str(folder), app=site.app)
    eventually(lambda: served(site) == ("ready", str(folder)), "it serves the other model")


def served(site: Site) -> tuple[str, str]:
    [state] = control.engines(app=site.app).values()
    return state["state"], state["model"]


def test_a_task_is_answered_by_one_model(site: Site, folders: list[Path]) -> None:
    reload(site, folders[0])
    old = site.get(embed(site, TEXTS))
    begun = embed(site, TEXTS * 600)
    site.streaming(begun)
    waiting = [embed(site, TEXTS) for _ in range(6)]
    reload(site, folders[1])
    new = site.get(embed(site, TEXTS))
    assert new["fingerprint"] != old["fingerprint"]
    with pytest.raises(ModelChanged, match=f"texts were answered by model {old['fingerprint']}"):
        site.get(begun)
    delivered = logged(site, begun)
    assert 0 < len(delivered) < 600 * len(TEXTS)
    assert delivered == (old["vectors"] * 600)[: len(delivered)]
    assert site.state(begun)["model"] == old["fingerprint"], "it is not recorded as the work of the new one"
    by_model = {value["fingerprint"]: value["vectors"] for value in (old, new)}
    for task in waiting:
        try:
            value = site.get(task)
        except ModelChanged:  # it had begun, too
            assert logged(site, task) == old["vectors"][: len(logged(site, task))]
        else:
            assert value["vectors"] == by_model[value["fingerprint"]] == logged(site, task)


MANY = """
import sys
from petiole import embed
from petiole.tasks.errors import ModelChanged
from petiole.tasks.fleet import control

def reload(n):
    if n == 1:
        control.reload(sys.argv[1])
        while [(one["state"], one["model"]) for one in control.engines().values()] != [("ready", sys.argv[1])]:
            pass

texts = [f"text number {k}" for k in range(40)]
try:
    embed.many(texts, batch=1, on_progress=reload, timeout_s=60)
except ModelChanged as error:
    assert "texts were answered by model" in str(error), error
else:
    raise AssertionError("vectors of two models were joined")
"""


def test_vectors_of_two_models_are_not_joined(site: Site, folders: list[Path]) -> None:
    """Tasks that are submitted after the reload are answered by the other model."""
    reload(site, folders[0])
    ran = subprocess.run(
        [sys.executable, "-c", MANY, str(folders[1])],
        env={"PETIOLE_BROKER_URL": site.url, "PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
