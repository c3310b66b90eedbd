"""Vectors of texts: what transformers pools, whatever a text was batched with; encodings; refusals; ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from petiole.contract.results.vectors import MOST_BYTES, Vectors, most_texts, n_bytes
from petiole.gpu_worker import Embedding, Engine, EngineConfig, FinishReason, HandedBack, InvalidRequest, Request
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from tests.support.text_models import PROMPTS, cosine, reference, write_qwen3_embedder

WIDTH = 64
TEXTS = ["hello world", "a" * 90, "hello there", "x", "hello world, and more of it", "ü"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("qwen3-embedding")
    return folder, write_qwen3_embedder(folder)


@pytest.fixture(scope="module")
def engine(embedder: tuple[Path, Any]) -> Iterator[Engine]:
    with open_engine(embedder[0], debug=True) as engine:
        yield engine


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, **settings))


def vectors(engine: Engine, texts: list[str], **asked: Any) -> Vectors:
    result = engine.generate([Request(texts=texts, embedding=Embedding(**asked))])[0]
    assert result.vectors is not None
    assert result.answer is not None
    assert len(result.vectors) == len(texts) == len(result.token_ids)
    return Vectors(result.vectors, result.answer["dimensions"], result.answer["encoding"])


@pytest.fixture(scope="module")
def expected(embedder: tuple[Path, Any]) -> Callable[..., np.ndarray]:
    folder, model = embedder
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def of(text: str) -> np.ndarray:
        return reference(model, tokenizer.encode(text).ids, "lasttoken")

    return of


def test_the_vectors_are_those_of_transformers(engine: Engine, expected: Callable[..., np.ndarray]) -> None:
    for text, vector in zip(TEXTS, vectors(engine, TEXTS), strict=True):
        assert cosine(vector, expected(text)) > 0.99999
        assert abs(np.linalg.norm(vector) - 1) < 1e-6


def test_a_prompt_stands_before_each_text(engine: Engine, expected: Callable[..., np.ndarray]) -> None:
    for text, vector in zip(TEXTS, vectors(engine, TEXTS, prompt_name="query"), strict=True):
        assert cosine(vector, expected(PROMPTS["query"] + text)) > 0.99999


def test_a_matryoshka_vector_is_cut_and_then_normalised(
    engine: Engine, expected: Callable[..., np.ndarray]
) -> None:
    for text, vector in zip(TEXTS, vectors(engine, TEXTS, dimensions=10), strict=True):
        assert len(vector) == 10
        assert cosine(vector, expected(text)[:10]) > 0.99999
        assert abs(np.linalg.norm(vector) - 1) < 1e-6


def test_a_vector_keeps_its_length_if_asked(engine: Engine, expected: Callable[..., np.ndarray]) -> None:
    found = vectors(engine, TEXTS, normalize=False).numpy()
    assert np.allclose(found, [expected(text) for text in TEXTS], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(load_library() is None, reason="no C compiler: torch's products differ with their size")
def test_a_text_has_the_same_bits_alone_and_among_others(engine: Engine) -> None:
    alone = [vectors(engine, [text]).data[0] for text in TEXTS]
    many = vectors(engine, TEXTS * 5).data
    assert list(many) == alone * 5


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8", "bits"])
def test_an_encoding_says_the_same_as_lists_and_as_numpy(engine: Engine, encoding: Any) -> None:
    exact = vectors(engine, TEXTS, dimensions=20).numpy()
    found = vectors(engine, TEXTS, dimensions=20, encoding=encoding)
    assert {len(one) for one in found.bytes()} == {n_bytes(20, encoding)}
    lists = np.array(found.lists())
    if encoding == "bits":
        assert (lists == (exact > 0)).all()
        assert (found.numpy() == np.packbits(exact > 0, axis=1)).all()
    else:
        assert np.allclose(lists, found.numpy(), rtol=1e-6, atol=0)
        assert np.allclose(lists, exact, atol={"float32": 0, "float16": 1e-3, "int8": 4e-3}[encoding])
    assert found[1:3].lists() == found.lists()[1:3]


def test_a_result_counts_tokens(engine: Engine) -> None:
    result = engine.generate([Request(texts=["ab", "abcd"], embedding=Embedding(prompt_name="query"))])[0]
    n = len(PROMPTS["query"])
    assert result.token_ids == (n + 3, n + 5)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2 * n + 8, 0)
    assert result.finish_reason is FinishReason.STOP


def test_texts_that_share_a_beginning_are_computed_once(engine: Engine) -> None:
    shared = "one and the same beginning of a text, "
    engine.generate([Request(texts=[shared + "a"], embedding=Embedding())])
    result = engine.generate([Request(texts=[shared + "b"], embedding=Embedding())])[0]
    assert result.usage.cached_prompt_tokens >= len(shared)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"texts": []}, "texts: must not be empty"),
    ({"texts": "abc"}, "texts: must be a list of texts"),
    ({"texts": ["a", ""]}, r"texts\[1\]: must not be empty"),
    ({"texts": ["a", 3]}, r"texts\[1\]: must be a string, got int"),
    ({"texts": ["a", "b" * 300]}, r"texts\[1\]: must have at most 256 tokens, got 301 tokens"),
    ({"texts": ["a"], "prompt": "b"}, "prompt: must not be given with texts"),
    ({"texts": ["a"], "embedding": Embedding(prompt_name="no")}, r"prompt_name: must be one of .*document, query"),
    ({"texts": ["a"], "embedding": Embedding(dimensions=WIDTH + 1)}, "dimensions: must be 1 to 64, .* got 65"),
    ({"texts": ["a"], "embedding": Embedding(encoding="int4")}, "encoding: must be float32"),  # type: ignore[arg-type]
    ({"texts": ["a"] * 10_001}, "texts: must be at most 10000, whose vectors of 64 dimensions as float32 fit"),
    ({"prompt": "a"}, "prompt: the model .* makes vectors of texts, and generates nothing"),
    ({"messages": [{"role": "user", "content": "a"}]}, "messages: the model .* generates nothing"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_by_name(engine: Engine, fields: dict[str, Any], message: str) -> None:
    steps = engine.stats()["steps"]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate([Request(**fields)])
    assert engine.stats()["steps"] == steps, "before anything is computed"


def test_a_model_that_generates_makes_no_vectors() -> None:
    with (
        Engine(EngineConfig(model="petiole-tiny", device="cpu", max_num_seqs=2)) as engine,
        pytest.raises(InvalidRequest, match="texts: the model petiole-tiny generates, and makes no vectors"),
    ):
        engine.generate([Request(texts=["a"], embedding=Embedding())])


def test_a_text_that_is_too_long_is_cut_where_asked(engine: Engine, expected: Callable[..., np.ndarray]) -> None:
    """The special token at its end stays."""
    found = vectors(engine, ["b" * 300], truncate=True)
    assert cosine(found[0], expected("b" * 255)) > 0.99999


def test_most_texts_fit_into_a_result() -> None:
    for dimensions in (1, 64, 1024, 4096):
        for encoding in ("float32", "float16", "int8", "bits"):
            most = most_texts(dimensions, encoding)  # type: ignore[arg-type]
            each = len('"",') + 4 * -(-n_bytes(dimensions, encoding) // 3)  # type: ignore[arg-type]
            assert 1 <= most <= 10_000
            assert most * each <= MOST_BYTES


def test_a_cancelled_request_ends_with_the_vectors_so_far(engine: Engine) -> None:
    handle = engine.submit(
        Request(texts=TEXTS * 200, embedding=Embedding()), on_delta=lambda handle, _: handle.cancel()
    )
    result = handle.result(60)
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.vectors is not None
    assert 0 < len(result.vectors) == len(result.token_ids) < 200 * len(TEXTS)
    assert [*handle][-1].finish_reason is FinishReason.CANCELLED


def test_a_request_that_was_handed_back_goes_on_at_the_next_text(engine: Engine) -> None:
    texts = TEXTS * 10
    whole = vectors(engine, texts)
    handle = engine.submit(
        Request(texts=texts, embedding=Embedding()), on_delta=lambda handle, _: handle.hand_back()
    )
    with pytest.raises(HandedBack):
        handle.result(60)
    made = handle._deltas
    counts = [count for delta in made for count in delta.token_ids]
    before = [vector for delta in made for vector in delta.vectors or ()]
    assert 0 < len(before) == len(counts) < len(texts)
    request = Request(texts=texts, embedding=Embedding(), resume_token_ids=counts)
    resumed = engine.submit(request)
    rest = resumed.result(60)
    assert next(iter(resumed)).index == len(counts)
    assert rest.vectors is not None
    assert [*before, *rest.vectors] == list(whole.data)
    assert len(rest.token_ids) == len(texts)


def test_a_deadline_ends_a_request_of_many_texts(engine: Engine) -> None:
    request = Request(texts=TEXTS * 1000, embedding=Embedding(), deadline_s=0.05)
    assert engine.submit(request).result(60).finish_reason is FinishReason.DEADLINE


def test_draining_completes_all_texts(embedder: tuple[Path, Any]) -> None:
    engine = open_engine(embedder[0]).start()
    handle = engine.submit(Request(texts=TEXTS * 20, embedding=Embedding()))
    engine.shutdown(drain=True)
    assert len(handle.result(0).vectors or ()) == 20 * len(TEXTS)


def test_a_shutdown_ends_requests_of_texts(embedder: tuple[Path, Any]) -> None:
    engine = open_engine(embedder[0]).start()
    handle = engine.submit(Request(texts=TEXTS * 500, embedding=Embedding()))
    engine.shutdown(drain=False)
    assert handle.result(0).finish_reason is FinishReason.CANCELLED
    assert not engine._requests.parts
    assert not engine._requests.runs


def test_two_requests_take_turns(engine: Engine) -> None:
    """A long one does not hold up a short one behind it."""
    engine.pause()
    both = [threading.Event(), threading.Event()]
    long, short = (
        engine.submit(Request(texts=texts, embedding=Embedding()), on_prepared=lambda *_, event=event: event.set())
        for texts, event in zip((TEXTS * 500, TEXTS), both, strict=True)
    )
    assert all(event.wait(60) for event in both)
    engine.resume()
    short.result(60)
    assert not long.done()
    long.cancel()
    long.result(60)


def test_one_text_as_tokens(engine: Engine) -> None:
    """As the texts of a request are in the engine."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    result = engine.generate([Request(prompt=[5, 6, 2], embedding=Embedding(), sampling=sampling)])[0]
    assert result.vectors is not None
    assert len(Vectors(result.vectors, WIDTH)[0]) == WIDTH
