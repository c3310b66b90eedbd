"""`embed` through Celery with a small random model of texts: its vectors, its stream, its ends, its canvas."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from celery import chain, chord, group

from petiole.contract.results.task_result import GenerationResult
from petiole.contract.results.vectors import Vectors
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker.completion.claims import RETIRING_MS
from tests.support.site import REPOSITORY, Site, eventually
from tests.support.text_models import cosine, reference, write_qwen3_embedder
from tests.support.trials import rest

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
        "PETIOLE_MAX_ATTEMPTS": 1000,  # a task may meet several of the deaths here
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
    value, logged, sent = site.get(task), site.tokens(task), together(site, task, "vectors")
    tokenizer = tokenizers.Tokenizer.from_file(str(model[0] / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    for vector, one in zip(Vectors.of(value), ids, strict=True):
        assert cosine(vector, reference(model[1], one, "lasttoken")) > 0.99999
    assert value["token_ids"] == logged == [len(one) for one in ids]
    assert value["vectors"] == sent
    result = GenerationResult.model_validate(value)
    assert (result.dimensions, result.encoding, result.finish_reason, result.attempt) == (64, "float32", "stop", 1)
    assert result.usage.prompt_tokens == sum(map(len, ids))


def test_no_text_is_computed_twice_after_a_death(site: Site) -> None:
    """What the log has is not computed again: the second attempt begins at the text behind it."""
    value = site.get(embed(site, TEXTS).apply_async(task_id="whole"))
    doomed = embed(site, TEXTS).apply_async(task_id="die-9-embed")
    again, log = site.get(doomed), site.log(doomed)
    site.start_worker()  # in place of the one that has died
    assert again["attempt"] == 2
    assert again["vectors"] == value["vectors"] == [one for delta in log for one in delta.get("vectors") or ()]
    assert again["token_ids"] == value["token_ids"]
    starts = [delta["index"] for delta in log]
    ends = [delta["index"] + len(delta["token_ids"]) for delta in log]
    assert starts == [0, *ends[:-1]], "no gap, and nothing twice"
    first = [delta for delta in log if delta["attempt"] == 1]
    assert sum(len(delta["token_ids"]) for delta in first) >= 9
    assert log[-1]["attempt"] == 2


LATE = """
import json, sys
from petiole.tasks.streams.readers import Stream

def read(start):
    deltas = [*Stream(sys.argv[1], start=start, timeout_s=60)]
    joined = {name: [one for delta in deltas for one in getattr(delta, name) or ()] for name in NAMES}
    return joined | {"finish_reason": deltas[-1].finish_reason}

NAMES = ("vectors", "token_ids")
print(json.dumps({start: read(start) for start in (0, 7, 40)}))
"""


def ran(site: Site, code: str, *arguments: str) -> str:
    """What a producer prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PETIOLE_BROKER_URL": site.url, "PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_vectors_are_stored_once(site: Site) -> None:
    """Once the task is completed its log goes, and later readers are served from the result."""
    task = embed(site, TEXTS).apply_async()
    value = site.get(task)
    eventually(lambda: "retired" in site.state(task), "the task is completed")
    keys = stream_keys(task.id)
    assert 0 < site.redis.pttl(keys.log) <= RETIRING_MS
    assert site.redis.ttl(keys.state) > RETIRING_MS / 1000
    site.redis.delete(keys.log)  # as if it had expired
    for start, read in json.loads(ran(site, LATE, task.id)).items():
        assert read["vectors"] == value["vectors"][int(start) :]
        assert read["token_ids"] == value["token_ids"][int(start) :]
        assert read["finish_reason"] == "stop"


def test_vectors_stay_in_a_log_that_is_kept_longer_than_the_result(site: Site) -> None:
    silent = embed(site, TEXTS).apply_async(ignore_result=True)
    short = embed(site, TEXTS, result_expires_s=60, stream_ttl_s=600).apply_async()
    for task in (silent, short):
        assert [*site.deltas(task)][-1][1]["finish_reason"] == "stop"
    site.get(short)
    eventually(lambda: not site.unfinished(), "their messages are settled")
    for task in (silent, short):
        assert "retired" not in site.state(task)
        assert site.redis.pttl(stream_keys(task.id).log) > RETIRING_MS


def test_a_message_that_comes_again_after_its_log_and_result_are_gone_stores_nothing(site: Site) -> None:
    task = embed(site, TEXTS).apply_async(task_id="comes-again")
    site.get(task)
    eventually(lambda: "retired" in site.state(task), "the task is completed")
    task.forget()
    site.redis.delete(stream_keys(task.id).log)
    embed(site, TEXTS).apply_async(task_id="comes-again")
    eventually(lambda: not site.unfinished(), "its message is settled")
    assert site.app.AsyncResult("comes-again").state == "PENDING"


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
    ran(site, MANY)


SOME = """
import json, sys
from pathlib import Path
from petiole import embed

def tell(n):
    print(n, flush=True)
    input()  # until the accident has happened

n, batch, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
joined = embed.many((f"text number {k}" for k in range(n)), batch=batch, timeout_s=120, on_progress=tell)
path.write_text(json.dumps([*joined.data]))
"""


def embedded(site: Site, path: Path, n: int, batch: int, accidents: Mapping[int, Callable[[], object]]) -> Any:
    """The vectors of `n` texts. Before more than so many are there, an accident happens."""
    command, due = [sys.executable, "-c", SOME, str(n), str(batch), str(path)], sorted(accidents)
    environment = {"PETIOLE_BROKER_URL": site.url, "PATH": "", "PYTHONPATH": str(REPOSITORY)}
    pipe, text = subprocess.PIPE, True
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=text) as producer:
        assert producer.stdin is not None
        assert producer.stdout is not None
        assert producer.stderr is not None
        for line in producer.stdout:
            while due and due[0] <= int(line):
                accidents[due.pop(0)]()
            producer.stdin.write("\n")
            producer.stdin.flush()
        errors = producer.stderr.read()
    assert producer.returncode == 0, errors
    assert not due, "every accident has happened"
    return json.loads(path.read_text())


@pytest.mark.parametrize(("n", "batch", "every", "seed"), rest([(600, 20, 150, 1), (10_000, 100, 500, 2)]))
def test_kills_and_a_restart_of_redis_lose_and_double_no_vector(
    site: Site, tmp_path: Path, n: int, batch: int, every: int, seed: int
) -> None:
    """Of many texts, while workers are killed one after the other, and Redis is started again."""
    draw = random.Random(seed)

    def kill() -> None:
        draw.choice([worker for worker in site.workers if worker.alive()]).kill()
        site.start_worker()

    at = [draw.randrange(start, start + every, batch) for start in range(batch, n - 2 * every, every)]
    accidents: dict[int, Callable[[], object]] = dict.fromkeys(at, kill)
    accidents[at[len(at) // 2] + 1] = site.server.restart
    whole = embedded(site, tmp_path / "undisturbed", n, batch, {})
    assert len(set(whole)) == n, "no two texts have the same vector"
    assert embedded(site, tmp_path / "disturbed", n, batch, accidents) == whole
    eventually(lambda: not site.unfinished(), "all messages are settled")


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
