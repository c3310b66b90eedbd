"""`petiole-tiny-embed`: small, whole, what sentence-transformers would compute, and as good as its card says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from petiole.contract.results.vectors import Vectors
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request
from petiole.tasks.commands.demos.search import ASKED, PASSAGES, nearest
from training.embed.pairs import DRAWS, Pair, draw, split_of

pytest.importorskip("transformers")
from training.embed import evaluate
from training.embed.train import MODEL_FOLDER, SIZES

LARGEST_MB = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(EngineConfig(model="petiole-tiny-embed", device="cpu", dtype="float32")) as engine:
        yield engine


def embedded(engine: Engine, texts: list[str], **asked: Any) -> Vectors:
    result = engine.generate([Request(texts=texts, embedding=Embedding(**asked))])[0]
    assert result.vectors is not None
    return Vectors(result.vectors, SIZES[0])


def test_the_folder_is_small_and_whole() -> None:
    files = [path for path in MODEL_FOLDER.rglob("*") if path.is_file()]
    names = {str(path.relative_to(MODEL_FOLDER)) for path in files}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "README.md", "modules.json"}
    assert names >= {"1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json"}
    assert sum(path.stat().st_size for path in files) <= LARGEST_MB * 1_000_000
    assert json.loads((MODEL_FOLDER / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", DRAWS)
def test_pairs_are_drawn_from_a_seed_and_held_out_by_what_they_are_about(name: str) -> None:
    drawn = [[draw(name, rng, split) for _ in range(40)] for split in ("train", "held-out") for rng in [Random(3)]]
    assert drawn[0] == [draw(name, rng, "train") for rng in [Random(3)] for _ in range(40)]
    for split, pairs in zip(("train", "held-out"), drawn, strict=True):
        assert {split_of(f"{name} {pair.about}") for pair in pairs} == {split}
    assert len({pair.one for pair in drawn[1]}) > 10


def test_figures_are_of_the_nearest_text() -> None:
    pairs = [Pair("", "", "a"), Pair("", "", "b", kind="x"), Pair("", "", "c", kind="x")]
    twos = np.eye(3, dtype=np.float32)
    assert evaluate.figures(pairs, twos, twos) == (1.0, 1.0)
    assert evaluate.figures(pairs, twos[[0, 2, 1]], twos) == (1.0, 1.0)  # of one kind
    assert evaluate.figures(pairs, twos[[1, 1, 2]], twos)[0] == pytest.approx(2 / 3)
    assert evaluate.ranks(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]


def test_the_engine_computes_what_transformers_computes(engine: Engine) -> None:
    """Pooling, prompts and lengths are read from the files."""
    model, tokenizer = evaluate.load(MODEL_FOLDER)
    texts = [*PASSAGES, "Zürich?", "word " * 60]
    expected = evaluate.vectors(model, tokenizer, [f"passage: {text}" for text in texts])
    found = embedded(engine, texts, prompt_name="passage").numpy()
    assert (found * expected).sum(1).min() > 0.99999


def test_questions_find_passages_in_other_words(engine: Engine) -> None:
    passages = embedded(engine, list(PASSAGES), prompt_name="passage")
    questions = embedded(engine, [question for question, _ in ASKED], prompt_name="query")
    assert [nearest(question, passages)[0] for question in questions] == [right for _, right in ASKED]


@pytest.mark.slow
def test_it_is_as_good_as_its_card_says() -> None:
    """Held-out pairs, fewer than for the card."""
    model, tokenizer = evaluate.load(MODEL_FOLDER)
    rows = [line.split("|") for line in (MODEL_FOLDER / "README.md").read_text().splitlines() if line[:2] == "| "]
    said = {row[1].strip(): float(row[3]) for row in rows if row[1].strip() in DRAWS}
    assert said.keys() == DRAWS.keys()
    for name, (recall, mrr) in evaluate.searched(model, tokenizer, 60).items():
        assert recall >= said[name] - 0.15, name
        assert mrr >= recall
    assert evaluate.spearman(model, tokenizer, 100) > 0.5


def test_a_folder_is_written_that_is_read_again(tmp_path: Path) -> None:
    from training.embed import tokenizer as words
    from training.embed.train import export, new_model, train

    tokenizer = words.build(n_texts=300)
    model = new_model(tokenizer)
    assert train(model, tokenizer, 1e-9, 1, layers=True) == 0
    export(model, tokenizer, tmp_path)
    with Engine(EngineConfig(model=str(tmp_path), device="cpu")) as engine:
        assert len(embedded(engine, ["how do I pay"], prompt_name="query")[0]) == SIZES[0]
