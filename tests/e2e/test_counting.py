"""Counts are answered at once, whatever the engine does, and as the engine would count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker.text import load_tokenizer
from petiole.tasks import InvalidRequest
from petiole.tasks.app.application import make_app
from petiole.tasks.settings import settings
from petiole.tasks.submission.counting import CountTask
from tests.support.site import REPOSITORY, Site, eventually

TINY = REPOSITORY / "gpu_worker" / "models" / "petiole_tiny"
REAL = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}
CHAT = [{"role": "user", "content": "How many is <|im_end|>?"}]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
        settings.cache_clear()
        yield site
        settings.cache_clear()


@pytest.fixture
def count(site: Site) -> Any:
    """A producer of this site. Not shared: each later app of this process would have this task, too."""
    app = make_app()

    @app.task(name="tasks.count", base=CountTask, bind=True, shared=False)  # type: ignore[untyped-decorator]
    def count(self: CountTask, **_: object) -> None: ...

    return count


def test_counts_of_the_real_engine_are_those_of_its_requests(site: Site, count: Any) -> None:
    site.worker(PETIOLE_NUM_PAGES=2000, PETIOLE_MAX_NUM_SEQS=4, **REAL)
    tokenizer = load_tokenizer(TINY)
    texts = ["Count from 1 to 5.", "é" * 3000, "x"]
    found = count.delay(texts=texts, with_ids=True, with_tokens=True).get(timeout=60)
    assert found["token_ids"] == [tokenizer.encode(text) for text in texts]
    assert found["counts"] == [len(ids) for ids in found["token_ids"]]
    assert found["tokens"] == [[*map(tokenizer.entry, ids)] for ids in found["token_ids"]]
    assert (found["model"], found["counts"][1] > found["max_model_len"]) == ("petiole-tiny", True)
    rendered = count.delay(messages=CHAT, with_ids=True).get(timeout=60)
    assert rendered["token_ids"] == [tokenizer.apply_chat_template(CHAT)]
    result = site.app.send_task("tasks.chat", kwargs={"messages": CHAT, "max_tokens": 1})
    assert [site.get(result)["usage"]["prompt_tokens"]] == rendered["counts"]
    back = count.delay(token_ids=found["token_ids"][:1]).get(timeout=60)
    assert back["texts"] == [tokenizer.decode(found["token_ids"][0])]
    assert asyncio.run(_asked(count)) == found["counts"][2]
    for options, said in (
        ({"token_ids": [[1], [2**30]]}, r"^token_ids\[1\]: must"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "AAAA"}]}]}, r"^messages\[0\]"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            count.delay(**options).get(timeout=60)


async def _asked(count: Any) -> int:
    found = await (await count.adelay(texts="x")).aget(timeout=60)
    return int(found["counts"][0])


def test_a_full_engine_and_a_long_queue_delay_no_count(site: Site, count: Any) -> None:
    worker = site.worker(PETIOLE_MAX_NUM_SEQS=1, PETIOLE_FAKE_STEP_MS=20)
    busy = [site.generate(f"busy {k}", max_tokens=4000, seed=k) for k in range(40)]
    site.streaming(busy[0])
    assert site.queued() > 20
    for _ in range(20):
        assert count.delay(texts=["one two three"]).get(timeout=60)["counts"] == [3]
    assert site.queued() > 20, "nothing else went on meanwhile"
    site.app.control.broadcast("pause_engine", reply=True, timeout=30, limit=1)
    assert count.delay(texts="one two", require_worker=True).get(timeout=60)["counts"] == [2]
    assert worker.stop() == 0


def test_a_count_outlives_its_worker(site: Site, count: Any) -> None:
    waiting = count.delay(texts="one two")
    assert waiting.submitted_to == "petiole"
    site.redis.lpush("petiole.count", b"garbage")
    site.app.send_task("tasks.generate", kwargs={"prompt": "x"}, queue="petiole.count")
    first = site.worker()
    assert waiting.get(timeout=60)["counts"] == [2]
    eventually(lambda: site.redis.llen("petiole:quarantine") == 2, "the others are put aside")
    first.kill()
    later = count.delay(texts="one two three")
    site.worker()
    assert later.get(timeout=60)["counts"] == [3]
    eventually(lambda: site.held() == 0, "nothing is held")


def test_a_count_in_a_queue_of_generations_is_answered_too(site: Site) -> None:
    site.worker()
    result = site.app.send_task("tasks.count", kwargs={"texts": ["one two"]})
    assert result.get(timeout=60)["counts"] == [2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "texts: exactly one of texts, messages, token_ids must be given, got 0 of them"),
        ({"texts": ["a"], "token_ids": [[1]]}, "token_ids: exactly one of"),
        ({"texts": []}, "texts: must not be empty"),
        ({"texts": ["a", ""]}, r"texts\[1\]: must not be empty"),
        ({"texts": ["a"], "tools": [{}]}, "tools: needs messages, got texts"),
        ({"messages": [{"content": "a"}]}, r"messages\[0\].role: must be text"),
        ({"token_ids": [[-1]]}, r"token_ids\[0\]\[0\]: must be at least 0"),
        ({"texts": ["a"], "max_tokens": 3}, "max_tokens: is not an option of this task"),
        ({"texts": ["a"], "countdown": 3}, "countdown: must not be given"),
    ],
)
def test_bad_input_is_named_where_it_is_given(count: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{said}"):
        count.delay(**options)
