"""`embed` with all that BGE-M3 makes, through Celery: as result and stream, after a death, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from petiole.contract.results.vectors import SparseVectors, TokenVectors, Vectors
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.definitions import embed as embed_task
from tests.support.site import Site, eventually
from tests.support.text_models import write_m3

TEXTS = [f"text number {k}" for k in range(40)]
FIELDS = ("vectors", "sparse", "colbert")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("m3")
    (folder / "model").mkdir()
    write_m3(folder / "model")
    more: dict[str, Any] = {
        "PETIOLE_ENGINE_FACTORY": "tests.support.mortal_engine:MortalEngine",
        "PETIOLE_MODEL": str(folder / "model"),
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_MAX_NUM_SEQS": 4,
        "PETIOLE_NUM_THREADS": 1,
        "PETIOLE_DEATHS": folder,
        "PETIOLE_VISIBILITY_TIMEOUT_S": 2,
        "PETIOLE_DRAIN_SECONDS": 0,
    }
    with Site(folder, **more) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        yield site


def embed(site: Site, texts: list[str], **options: Any) -> Any:
    return site.app.signature("tasks.embed", kwargs={"texts": texts, **options})


def test_all_of_a_text_survives_the_death_of_a_worker(site: Site) -> None:
    """The result is what the stream had, and what an undisturbed task has; then the stream's log goes."""
    outputs = ["dense", "sparse", "colbert"]
    whole = site.get(embed(site, TEXTS, outputs=outputs).apply_async(task_id="whole"))
    doomed = embed(site, TEXTS, outputs=outputs).apply_async(task_id="die-9-m3")
    again, log = site.get(doomed), site.log(doomed)
    assert again["attempt"] == 2
    for name in FIELDS:
        assert again[name] == whole[name] == [one for delta in log for one in delta.get(name) or ()]
    assert len(Vectors.of(again)) == len(SparseVectors.of(again)) == len(TokenVectors.of(again)) == len(TEXTS)
    assert TokenVectors.of(again).dimensions == again["token_dimensions"] == 24
    eventually(lambda: "retired" in site.state(doomed), "the task is completed")


def test_one_output_alone_is_sent(site: Site) -> None:
    value = site.get(embed(site, TEXTS, outputs=["sparse"]).apply_async())
    assert value.keys() & set(FIELDS) == {"sparse"}
    assert site.get(embed(site, TEXTS).apply_async()).keys() & set(FIELDS) == {"vectors"}


def test_bad_outputs_are_refused_by_name(site: Site) -> None:
    for outputs, message in [
        (["words"], "outputs"),
        ([], "outputs"),
        (["dense", "dense"], "name each output once"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            embed_task.delay(texts=["a"], outputs=outputs)
    with pytest.raises(InvalidRequest, match=r"outputs: must be \['dense'\], which embed.many joins"):
        embed_task.many(["a"], outputs=["sparse"])
