"""Pictures on their way to vLLM, which makes pixels and places of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.settings.engine import EngineConfig
from petiole.engines.vllm import VllmEngine
from petiole.gpu_worker import Engine, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.engine.serving import Serving
from tests.engines.conftest import VLLM, Make
from tests.support import seeing

TWO = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]}
PLAIN = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def model(tmp_path: Path) -> str:
    seeing.write_seeing(tmp_path, "qwen3-vl")
    return str(tmp_path)


def asked(*pictures: bytes) -> Request:
    return Request(messages=[TWO], images=list(pictures), sampling=SamplingParams(**PLAIN))


def tokens_of(engine: Serving[Any], request: Request) -> tuple[int, ...]:
    return engine.submit(request).result().token_ids


def drawn(seed: int, **more: Any) -> bytes:
    return seeing.as_file(seeing.drawn_picture(80, 48, seed), **more)


def test_pictures_are_passed_in_their_order(stand_in: Make, model: str) -> None:
    engine, one, other = stand_in(model=model, max_model_len=512), drawn(1), drawn(2)
    assert engine.facts()["images"]
    whole = tokens_of(engine, asked(one, other))
    assert tokens_of(engine, asked(one, other)) == whole
    assert len({whole, tokens_of(engine, asked(other, one)), tokens_of(engine, asked(one, one))}) == 3
    resumed = engine.submit(replace(asked(one, other), resume_token_ids=whole[:3])).result()
    assert resumed.token_ids == whole


def test_a_picture_that_cannot_be_read_fails_its_task_alone(stand_in: Make, model: str) -> None:
    engine, cut = stand_in(model=model, max_model_len=512), drawn(1)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        engine.submit(asked(cut[: len(cut) // 2], drawn(2))).result()
    with pytest.raises(InvalidRequest, match="must be as many"):
        engine.submit(asked(drawn(1))).result()
    assert len(tokens_of(engine, asked(drawn(1), drawn(2)))) == 8


def test_a_model_without_pictures_refuses_them(stand_in: Make) -> None:
    with pytest.raises(InvalidRequest, match="image"):
        stand_in().submit(asked(drawn(1), drawn(2))).result()


@pytest.mark.skipif(not VLLM, reason="PETIOLE_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_sees_what_petioles_own_engine_sees(model: str) -> None:
    arguments = "--dtype float32 --enforce-eager --max-num-seqs 8"
    config = EngineConfig(model=model, device="cpu", dtype="float32", max_model_len=512, max_num_seqs=8)
    questions = [asked(drawn(1), drawn(2)), asked(drawn(2), drawn(1)), asked(drawn(3), drawn(3))]
    with Engine(config) as engine:
        own = [tokens_of(engine, question) for question in questions]
    with VllmEngine(replace(config, vllm_python=VLLM, vllm_args=arguments)) as engine:
        assert [tokens_of(engine, question) for question in questions] == own
