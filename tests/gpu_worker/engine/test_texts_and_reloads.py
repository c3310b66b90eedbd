"""A reload among requests of texts: one model answers all texts of a request, or the request fails by name."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Embedding, Engine, EngineConfig, FinishReason, Request, Result
from petiole.gpu_worker.exceptions import HandedBack, ModelChanged
from petiole.gpu_worker.request import Scoring
from petiole.gpu_worker.request.handle import Handle
from tests.support.text_models import PROMPTS, write_judge, write_qwen3_embedder

TEXTS = [f"text {k}" for k in range(6)]
MANY = [f"text {k}" for k in range(1000)]
Make = Callable[..., Request]


def embed(texts: list[str], **options: Any) -> Request:
    return Request(texts=texts, embedding=Embedding(prompt_name="query"), **options)


def score(texts: list[str], **options: Any) -> Request:
    return Request(texts=[("a query", text) for text in texts], scoring=Scoring(), **options)


@pytest.fixture(scope="module", params=["embed", "score"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Make, list[Path]]:
    """Two models of one shape. The second embedder has another prompt, too."""
    folders = [tmp_path_factory.mktemp(f"{request.param}-{k}") for k in range(2)]
    if request.param == "score":
        for folder in folders:
            write_judge(folder, seed=folder.name)
        return score, folders
    write_qwen3_embedder(folders[0])
    write_qwen3_embedder(folders[1], "another", {**PROMPTS, "query": "where is "})
    return embed, folders


@pytest.fixture
def served(pair: tuple[Make, list[Path]]) -> Iterator[tuple[Engine, Make, list[Path]]]:
    make, folders = pair
    with Engine(EngineConfig(model=str(folders[0]), device="cpu", max_num_seqs=4, debug=True)) as engine:
        yield engine, make, folders


def made(result: Result) -> list[Any]:
    return list((result.vectors if result.scores is None else result.scores) or ())


def sent(handle: Handle) -> list[Any]:
    return [one for delta in handle._deltas for one in delta.vectors or delta.scores or ()]


def _released(delivered: threading.Semaphore, *_: object) -> None:
    delivered.release()


def prepared(engine: Engine, request: Request) -> tuple[Handle, list[str]]:
    """The request, once it is prepared, and the models for which it was."""
    ready, models = threading.Event(), list[str]()

    def on_prepared(_: Handle, facts: Any) -> None:
        models.append(facts.fingerprint)
        ready.set()

    handle = engine.submit(request, on_prepared=on_prepared)
    assert ready.wait(60)
    return handle, models


def test_a_request_that_has_delivered_nothing_starts_over_with_the_new_model(
    served: tuple[Engine, Make, list[Path]],
) -> None:
    engine, make, folders = served
    old = engine.generate([make(TEXTS)])[0]
    engine.pause()
    handle, models = prepared(engine, make(TEXTS))
    engine.reload(str(folders[1]))
    engine.resume()
    result, new = handle.result(60), engine.generate([make(TEXTS)])[0]
    assert made(result) == sent(handle) == made(new) != made(old)
    assert result.answer == new.answer
    assert result.answer is not None
    assert old.answer is not None
    assert models == [old.answer["fingerprint"], result.answer["fingerprint"]]
    assert result.token_ids == new.token_ids
    assert result.usage.prompt_tokens == new.usage.prompt_tokens


def test_a_request_that_has_delivered_some_ends_with_what_changed(
    served: tuple[Engine, Make, list[Path]],
) -> None:
    engine, make, folders = served
    begun = threading.Event()
    handle = engine.submit(make(MANY), on_delta=lambda *_: begun.set())
    assert begun.wait(60)
    engine.reload(str(folders[1]))
    with pytest.raises(ModelChanged, match=r"\d+ texts were answered by model \w+, and model \w+ is served now"):
        handle.result(60)
    engine.reload(str(folders[0]))
    whole, so_far = engine.generate([make(MANY[: len(sent(handle))])])[0], sent(handle)
    assert 0 < len(so_far) < len(MANY)
    assert so_far == made(whole), "nothing of the new model was delivered"
    assert not engine._requests.runs
    assert not engine._requests.parts


def test_a_reload_of_the_same_model_changes_nothing(served: tuple[Engine, Make, list[Path]]) -> None:
    engine, make, folders = served
    begun, texts = threading.Event(), MANY[:100]
    handle = engine.submit(make(texts), on_delta=lambda *_: begun.set())
    assert begun.wait(60)
    engine.reload(str(folders[0]))
    assert made(handle.result(60)) == made(engine.generate([make(texts)])[0])


def test_texts_of_another_model_are_not_resumed(served: tuple[Engine, Make, list[Path]]) -> None:
    engine, make, folders = served
    first = engine.generate([make(TEXTS)])[0]
    assert first.answer is not None
    counts, fingerprint = first.token_ids[:2], first.answer["fingerprint"]
    resumed = make(TEXTS, resume_token_ids=counts, resume_fingerprint=fingerprint)
    assert made(engine.generate([resumed])[0]) == made(first)[2:]
    engine.reload(str(folders[1]))
    steps = engine.stats()["steps"]
    with pytest.raises(ModelChanged, match=f"2 texts were answered by model {fingerprint}"):
        engine.generate([resumed])
    assert engine.stats()["steps"] == steps, "before anything is computed"
    engine.generate([make(TEXTS, resume_fingerprint=fingerprint)])  # of which nothing is made


@pytest.mark.parametrize("end", ["cancel", "hand_back"])
def test_a_request_that_waits_to_start_over_can_be_ended(
    served: tuple[Engine, Make, list[Path]], end: str
) -> None:
    engine, make, folders = served
    engine.pause()
    handle, _ = prepared(engine, make(MANY))
    engine.reload(str(folders[1]))
    getattr(handle, end)()
    engine.resume()
    if end == "cancel":
        assert handle.result(60).finish_reason is FinishReason.CANCELLED
    else:
        with pytest.raises(HandedBack):
            handle.result(60)
    assert engine.generate([make(TEXTS)])[0].finish_reason is FinishReason.STOP


def test_no_request_mixes_two_models(served: tuple[Engine, Make, list[Path]]) -> None:
    """Reloads at any moment of many requests."""
    engine, make, folders = served
    draw, expected, changed = random.Random(46), dict[str, list[Any]](), 0
    for folder in folders:
        engine.reload(str(folder))
        result = engine.generate([make(MANY[:60])])[0]
        assert result.answer is not None
        expected[result.answer["fingerprint"]] = made(result)
    for _ in range(4):
        delivered = threading.Semaphore(0)
        on_delta = partial(_released, delivered)
        sizes = [draw.choice((1, 7, 60)) for _ in range(5)]
        handles = [engine.submit(make(MANY[:n]), on_delta=on_delta) for n in sizes]
        for _ in range(draw.randrange(8)):
            assert delivered.acquire(timeout=60)
        for _ in range(draw.randint(1, 3)):
            engine.reload(str(draw.choice(folders)))
        for handle, n in zip(handles, sizes, strict=True):
            try:
                result = handle.result(60)
            except ModelChanged:
                changed += 1
                assert sent(handle) in [whole[: len(sent(handle))] for whole in expected.values()]
            else:
                assert result.answer is not None
                assert made(result) == sent(handle) == expected[result.answer["fingerprint"]][:n]
    assert not engine._requests.runs
    assert not engine._requests.parts
