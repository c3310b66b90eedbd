"""A worker whose model keeps states: what a prompt finds again changes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.families import build_model
from tests.support.site import Site
from tests.support.tokenizers import byte_level

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer, folder = byte_level(), tmp_path / "model"
    build_model("qwen3.5", vocab_size=tokenizer.get_vocab_size()).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def test_a_prompt_that_is_found_again_is_answered_as_before(folder: Path, tmp_path: Path) -> None:
    engine = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
        "PETIOLE_MODEL": str(folder),
    }
    prompts = ["The quick brown fox jumps over the lazy dog. " * 4 + end for end in ("One", "Two", "Three", "One")]
    with Site(tmp_path, **engine) as site:
        site.start_worker().ready()
        alone = [site.get(site.generate(p, salt=f"{i}", **GREEDY)) for i, p in enumerate(prompts)]
        found = [site.get(site.generate(prompt, **GREEDY)) for prompt in prompts]
    assert [value["token_ids"] for value in found] == [value["token_ids"] for value in alone]
    assert [value["usage"]["cached_prompt_tokens"] for value in alone] == [0] * 4
    first, second, third, last = (value["usage"]["cached_prompt_tokens"] for value in found)
    assert first == second == 0
    assert 0 < third < last, "the branch, then all but the last token"
