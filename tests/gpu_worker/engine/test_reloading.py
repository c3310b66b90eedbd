"""What a reload brings beside the weights: a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig, ModelError, Request, SamplingParams
from petiole.gpu_worker.models.checkpoint.finding import resolve_model

CHAT = Request(messages=[{"role": "user", "content": "Hi"}], sampling=SamplingParams(max_tokens=2, temperature=0))
PLAIN = Request(prompt="Count from 1", sampling=SamplingParams(max_tokens=2, temperature=0))


def changed(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The shipped model in `folder`, with one file changed."""
    shutil.copytree(resolve_model("petiole-tiny", None), folder)
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return str(folder)


@pytest.fixture(scope="module")
def engine() -> Any:
    with Engine(EngineConfig(model="petiole-tiny", device="cpu", max_num_seqs=2)) as engine:
        yield engine


def test_new_tasks_are_rendered_by_the_new_chat_template(engine: Engine, tmp_path: Path) -> None:
    def shorter(config: dict[str, Any]) -> None:
        config["chat_template"] = "{{ messages[0]['content'] }}"

    before = engine.submit(CHAT).result(timeout=60).usage.prompt_tokens
    engine.reload(changed(tmp_path / "other", "tokenizer_config.json", shorter))
    assert engine.submit(CHAT).result(timeout=60).usage.prompt_tokens < before


def test_a_tokenizer_that_gives_other_tokens_is_refused_and_the_present_one_stays(
    engine: Engine, tmp_path: Path
) -> None:
    def swapped(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["1"], vocab["2"] = vocab["2"], vocab["1"]

    before = engine.submit(PLAIN).result(timeout=60)
    with pytest.raises(ModelError, match="another tokenizer"):
        engine.reload(changed(tmp_path / "other", "tokenizer.json", swapped))
    assert engine.submit(PLAIN).result(timeout=60).token_ids == before.token_ids


def test_weights_without_a_tokenizer_keep_the_present_one(engine: Engine, tmp_path: Path) -> None:
    folder = changed(tmp_path / "other", "tokenizer_config.json", lambda config: None)
    (tmp_path / "other" / "tokenizer.json").unlink()
    present = engine.tokenizer
    engine.reload(folder)
    assert engine.tokenizer is present
    assert engine.submit(PLAIN).result(timeout=60).text
