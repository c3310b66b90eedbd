"""Vectors and scores are those that sentence-transformers made (`record_texts.py`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from petiole.contract.results.vectors import Vectors
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request, Scoring

HERE = Path(__file__).parent
TOKENIZER = HERE.parents[2] / "gpu_worker/models/petiole_tiny/embed"
RECORD = json.loads((HERE / "recorded_texts.json").read_text())


@pytest.mark.parametrize("key", RECORD["vectors"])
def test_vectors_with_prompts_and_cut_ones_are_those_of_the_library(key: str) -> None:
    prompt, width = key.split()
    wanted = Embedding(dimensions=int(width), prompt_name=None if prompt == "None" else prompt, normalize=True)
    with Engine(EngineConfig(model="petiole-tiny-embed", device="cpu", dtype="float32")) as engine:
        [result] = engine.generate([Request(texts=RECORD["texts"], embedding=wanted)])
    assert result.vectors is not None
    found, expected = Vectors(result.vectors, int(width)).numpy(), np.array(RECORD["vectors"][key])
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.99999
    assert np.abs(found - expected).max() < 1e-5


def test_scores_and_ranks_are_those_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RECORD["reranker"]))
    shutil.copyfile(HERE / "recorded_reranker.safetensors", tmp_path / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, tmp_path / name)
    pairs = [(RECORD["query"], text) for text in RECORD["texts"]]
    with Engine(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32")) as engine:
        [result] = engine.generate([Request(texts=pairs, scoring=Scoring())])
    assert result.scores is not None
    found = np.array(result.scores)[:, 0]
    assert found == pytest.approx(RECORD["scores"], abs=1e-5)
    assert found.argsort().tolist() == np.argsort(RECORD["scores"]).tolist()
