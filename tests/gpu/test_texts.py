"""Encoders on a card: the vectors of transformers, in steps of texts of many lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from petiole.contract.results.vectors import Vectors
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request
from tests.support.text_models import ENCODERS, cosine, reference, write_encoder

TEXTS = ["a" * n for n in (1, 30, 50, 2, 50)] + ["what is behind the door", "a key"]


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, name)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with Engine(EngineConfig(model=str(tmp_path), device="cuda", max_num_seqs=4, debug=True)) as engine:
        result = engine.generate([Request(texts=TEXTS * 3, embedding=Embedding())])[0]
    assert result.vectors is not None
    for text, vector in zip(TEXTS * 3, Vectors(result.vectors, 64), strict=True):
        expected = reference(model, tokenizer.encode(text).ids, ENCODERS[name][2])
        assert cosine(vector, expected) > 0.999, "in bfloat16"
