"""The head that drafts for petiole-tiny: what it is trained as is what the engine computes."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.harness.driver import Driver
from petiole.gpu_worker import EngineConfig
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from training.decode import load_folder
from training.drafts import Head, accepted, add_head, load_head, loss_of
from training.evaluate import accepted_drafts
from training.export import MODEL_FOLDER, export
from training.model import Qwen3, Shape
from training.text.data import Row, batch_of

SHAPE = Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, head_dim=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = Qwen3(SHAPE)
    export(model, tmp_path)
    head = Head.beginning(load_folder(tmp_path)[0])
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    add_head(head, tmp_path)
    return tmp_path


@pytest.fixture
def runtimes() -> Iterator[Callable[..., ModelRuntime]]:
    with ExitStack() as stack:

        def opened(**settings: Any) -> ModelRuntime:
            runtime = ModelRuntime(
                EngineConfig(device="cpu", dtype="float32", max_num_seqs=2, num_pages=200, **settings)
            )
            stack.callback(runtime.close)
            return runtime

        yield opened


def test_passes_are_the_drafts_of_the_engine(folder: Path, runtimes: Callable[..., ModelRuntime]) -> None:
    (model, _), head = load_folder(folder), load_head(folder)
    driver = Driver(runtimes(model=str(folder), speculative_tokens=3))
    sequence = driver.sequence([5, 17, 200, 33, 91, 7, 8])
    output = driver.prefill([sequence])
    for _ in range(3):
        known, drafts = [*sequence.prompt, *sequence.output], list[int]()
        for n in range(1, 4):
            tokens = torch.tensor([[*known, *drafts]])
            with torch.no_grad():
                made = head.passes(model, tokens, model.hidden(tokens)[0], n)[-1]
            drafts.append(int(model.logits(made[0, len(known) - 2]).argmax()))
        assert output.drafts[0].tolist() == drafts
        output = driver.decode([sequence])


def test_it_learns_what_the_model_says(folder: Path) -> None:
    model, head = load_folder(folder)[0], Head.beginning(load_folder(folder)[0])
    batch = batch_of([Row(list(range(5, 45)), [("", 10, 40)]), Row(list(range(50, 80)), [("", 5, 30)])])
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss, shares = loss_of(model, head, batch, 2)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert len(shares) == 2


def test_a_draft_counts_behind_right_ones_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that drafts the token by which it is fed: every answer of one token, repeated, holds."""
    model, head = load_folder(folder)[0], load_head(folder)
    monkeypatch.setattr(
        Head,
        "passes",
        lambda self, model, tokens, hidden, n: [model.model.embed_tokens(tokens[:, i:]) for i in range(1, n + 1)],
    )
    monkeypatch.setattr(
        Qwen3, "logits", lambda self, hidden: (hidden[:, None] == self.model.embed_tokens.weight).all(-1).float()
    )
    assert accepted(model, head, [([1, 2], [7, 7, 7, 8])], 2) == pytest.approx([2 / 3, 0.5])


def test_the_shipped_head_is_as_good_as_its_card_says() -> None:
    held = accepted_drafts(MODEL_FOLDER, 3)
    assert held[0] > 0.8
    assert held == sorted(held, reverse=True)


def test_programs_without_drafts_read_the_weights_of_a_plain_model() -> None:
    """vLLM takes what the index names; transformers takes `model.safetensors`."""
    index = json.loads((MODEL_FOLDER / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(MODEL_FOLDER / "model.safetensors").keys()
    assert set(index.values()) == {"model.safetensors"}
    assert not any(name.startswith("mtp.") for name in index)
