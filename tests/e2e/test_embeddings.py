"""`embed` through Celery with a small random model of texts: its vectors, its stream, its ends, its canvas."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from celery import chain, chord, group

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.requests.results import GenerationResult
from petiole.vectors import Vectors
from tests.support.site import REPOSITORY, Site
from tests.support.text_models import cosine, reference, write_qwen3_embedder

TEXTS = [f"text number {k}" for k in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3-embedding")
    return folder, write_qwen3_embedder(folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, model: tuple[Path, Any]) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("embeddings")
    more: dict[str, Any] = {
        "PETIOLE_ENGINE_FACTORY": "tests.support.mortal_engine:MortalEngine",
        "PETIOLE_MODEL": str(model[0]),
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


def embed(site: Site, texts: list[str] | None = None, **options: Any) -> Any:
    return site.app.signature("tasks.embed", kwargs={**({"texts": texts} if texts else {}), **options})


def together(site: Site, task: Any, field: str) -> list[Any]:
    return [entry for delta in site.log(task) for entry in delta.get(field) or ()]


def test_vectors_come_as_result_and_as_stream(site: Site, model: tuple[Path, Any]) -> None:
    task = embed(site, TEXTS).apply_async()
    value = site.get(task)
    tokenizer = tokenizers.Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    for vector, one in zip(Vectors.of(value), ids, strict=True):
        assert cosine(vector, reference(model[1], one, "lasttoken")) > 0.99999
    assert value["token_ids"] == site.tokens(task) == [len(one) for one in ids]
    assert value["vectors"] == together(site, task, "vectors")
    result = GenerationResult.model_validate(value)
    assert (result.dimensions, result.encoding, result.finish_reason, result.attempt) == (64, "float32", "stop", 1)
    assert result.usage.prompt_tokens == sum(map(len, ids))


def test_no_text_is_computed_twice_after_a_death(site: Site) -> None:
    """What the log has is not computed again: the second attempt begins at the text behind it."""
    value = site.get(embed(site, TEXTS).apply_async(task_id="whole"))
    doomed = embed(site, TEXTS).apply_async(task_id="die-9-embed")
    again = site.get(doomed)
    site.start_worker()  # in place of the one that has died
    assert again["attempt"] == 2
    assert again["vectors"] == value["vectors"] == together(site, doomed, "vectors")
    assert again["token_ids"] == value["token_ids"]
    log = site.log(doomed)
    starts = [delta["index"] for delta in log]
    ends = [delta["index"] + len(delta["token_ids"]) for delta in log]
    assert starts == [0, *ends[:-1]], "no gap, and nothing twice"
    first = [delta for delta in log if delta["attempt"] == 1]
    assert sum(len(delta["token_ids"]) for delta in first) >= 9
    assert log[-1]["attempt"] == 2


def test_groups_chords_and_chains(site: Site) -> None:
    several = group(embed(site, [text]) for text in TEXTS[:6]).apply_async()
    parts = [site.get(one) for one in several]
    whole = site.get(embed(site, TEXTS[:6]).apply_async())
    assert [part["vectors"][0] for part in parts] == whole["vectors"]
    after = embed(site, TEXTS[1:2]).set(immutable=True)
    assert site.get(chain(embed(site, TEXTS[:1]), after).apply_async())["vectors"] == whole["vectors"][1:2]
    joined = chord([embed(site, ["a"]), embed(site, ["b"])], after)
    assert site.get(joined.apply_async())["vectors"] == whole["vectors"][1:2]


MANY = """
from petiole import InvalidRequest, embed

texts = [f"text number {k}" for k in range(40)]
seen = []
joined = embed.many((text for text in texts), batch=7, on_progress=seen.append, timeout_s=60)
whole = embed.delay(texts=texts).get(timeout=60)
assert list(joined.data) == whole["vectors"], "in the order of the texts"
assert seen == [7, 14, 21, 28, 35, 40], seen
assert (len(joined), joined.dimensions, len(joined[3])) == (40, 64, 64)
assert len(embed.many([])) == 0
try:
    embed.many(["a", ""], batch=1)
except InvalidRequest as error:
    assert "texts[0]: must not be empty" in str(error), error
else:
    raise AssertionError("an empty text")
"""


def test_many_texts_are_split_and_joined(site: Site) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MANY],
        env={"PETIOLE_BROKER_URL": site.url, "PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_bad_input_fails_by_name(site: Site) -> None:
    for options, message in [
        ({"texts": ["a"], "prompt_name": "no"}, "prompt_name: must be one of the model's prompts"),
        ({"texts": ["a"], "dimensions": 65}, "dimensions: must be 1 to 64"),
        ({"texts": ["a", "b" * 400]}, r"texts\[1\]: must have at most 256 tokens"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            site.get(embed(site, **options).apply_async())
    with pytest.raises(InvalidRequest, match=r"prompt: the model .* generates nothing"):
        site.get(site.generate("hello"))


def test_a_task_that_is_revoked_stops(site: Site) -> None:
    task = embed(site, TEXTS * 200).apply_async()
    site.streaming(task)
    task.revoke(terminate=True)
    assert list(site.deltas(task))[-1][1]["finish_reason"] == "cancelled"
    assert len(together(site, task, "vectors")) < 200 * len(TEXTS)
