"""Random workloads of models that see: pictures of random sizes anywhere, shared beginnings, few pages,
preemption, chunks and cancels inside pictures, several answers to one prompt, and other eyes after a reload. Every
request that ends by itself has the log-probabilities of transformers. The books are checked after every step."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petiole.gpu_worker import Request, SamplingParams
from tests.support.seeing import PAD, as_file, drawn_picture, reference, write_seeing
from tests.support.trials import rest

NAMES = ["qwen3-vl", "qwen3.5", "gemma3", "mistral3", "qwen2.5-vl", "gemma4", "smolvlm"]
WHOLE = {"gemma3": 16, "gemma4": 70}
"""By name: positions of a picture that no chunk may cut."""
WIDE = {"gemma4": 2, "smolvlm": 3}
"""By name, where pictures have many positions: how many times as much room prompts need."""


def other_eyes(model: Any, folder: Path, name: str) -> Any:
    """The model with another tower, which `folder` has then."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for key, weight in other.named_parameters():
            if "vis" in key and weight.ndim > 1:
                weight.mul_(1.1)
    return write_seeing(folder, name, other)


@pytest.mark.parametrize("seed", rest([1, 2, 3]))
@pytest.mark.parametrize("name", rest(NAMES))
def test_a_random_workload(name: str, seed: int, open_engine: Callable[..., Any], tmp_path: Path) -> None:
    draw = random.Random(f"{name} {seed}")
    least = WHOLE.get(name, 3)
    wide = WIDE.get(name, 1)
    settings: dict[str, Any] = {
        "num_pages": wide * draw.choice([160, 260]),
        "max_num_seqs": draw.choice([2, 4]),
        "chunk_size": least + draw.randrange(6),
        "prefill_policy": draw.choice(["drain", "pipelined", "mixed"]),
        "prefix_cache": draw.choice(["radix", "off"]),
        "image_cache_bytes": draw.choice([0, 10_000, 2**20]),
        "max_model_len": 150 * wide,
        "debug": True,
    }
    engine, model = open_engine(name, **settings)
    sizes = [(draw.randrange(20, 170), draw.randrange(20, 110)) for _ in range(5)]
    pictures = [drawn_picture(*size, seed=k) for k, size in enumerate(sizes)]
    files = [as_file(one) for one in pictures]
    stems = [[5, "0", 6], [7, 8, 9]]

    def prompt() -> list[int | str]:
        """The reference takes pictures side by side for one: a token stands behind each."""
        made: list[int | str] = [*draw.choice(stems)]
        for _ in range(draw.randrange(1, 3)):
            made += [str(draw.randrange(5))] if draw.random() < 0.5 else []
            made.append(draw.randrange(3, 60))
        return made

    for reload in (False, True):
        if reload:
            model = other_eyes(model, tmp_path, name)
            engine.reload(str(tmp_path))
        asked = []
        for _ in range(8):
            parts = prompt()
            shown = [int(one) for one in parts if isinstance(one, str)]
            ids = [PAD if isinstance(one, str) else one for one in parts]
            sampling = SamplingParams(
                temperature=0.0, max_tokens=draw.randrange(1, 8), logprobs=20, ignore_eos=True
            )
            request = Request(prompt=ids, images=[files[k] for k in shown], sampling=sampling)
            handles = [engine.submit(request) for _ in range(draw.choice([1, 1, 3]))]
            cancelled = draw.random() < 0.3
            if cancelled:
                handles[0].cancel()
            asked.append((ids, shown, cancelled, handles))
        for ids, shown, cancelled, handles in asked:
            for handle in handles[cancelled:]:
                result = handle.result(timeout=300)
                if PAD in result.token_ids:  # which the reference would take for a picture
                    continue
                expected = reference(model, [*ids, *result.token_ids], [pictures[k] for k in shown])
                expected = expected[-len(result.token_ids) - 1 : -1]
                places = np.array([[token for token, _ in one.top] for one in result.logprobs])
                got = np.array([[logprob for _, logprob in one.top] for one in result.logprobs])
                expected = np.take_along_axis(expected, places, axis=1)
                assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-4, settings
            handles[0].result(timeout=300)
        assert not engine.runtime._features
