"""Random workloads of an engine over a model of each kind of attention, and over mixtures: shared prefixes, few
pages, preemption, drafts, cancels and adapters. Every request that ends by itself has the tokens of transformers,
and the books are checked after every step. `engine/test_stress.py` has the workloads that no model takes part
in."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, Request, SamplingParams
from tests.gpu_worker.models.test_generation import oracle
from tests.gpu_worker.models.test_lora import ATTENTION, LATENT, PRODUCTS
from tests.support.families import MIXTURES, WITH_LATENTS, write_adapter

KINDS = {
    "mistral": "a window in all layers",
    "gemma3": "two rotations, windows in some layers",
    "gemma4-per-layer": "keys of earlier layers, heads of two sizes, per-layer inputs",
    "gemma4-values-from-keys": "values from keys, heads of keys by layer",
    "olmo3": "norms of all heads together",
    "phi4-mini": "a part of a head rotated",
    "smollm3": "layers without rotation",
    "ministral3": "queries that grow",
    "gpt-oss": "experts and sinks",
    "glm4-moe": "experts, and layers without",
    "deepseek-v2": "latents, and queries of a product of fewer numbers",
    "deepseek-v2-lite": "latents",
}


@pytest.fixture(scope="module")
def adapter(
    checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    """adapter(family) -> (folder, the family's model with it), written once."""

    @cache
    def get(family: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("adapter")
        products = LATENT if family in WITH_LATENTS else ATTENTION if family in MIXTURES else PRODUCTS
        return folder, write_adapter(checkpoint(family)[1], folder, r=2, lora_alpha=4, target_modules=products)

    return get


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", KINDS)
def test_a_random_workload_has_the_tokens_of_transformers(
    family: str,
    seed: int,
    checkpoint: Callable[..., Any],
    adapter: Callable[[str], tuple[Path, Any]],
    open_runtime: Callable[..., Any],
) -> None:
    draw = random.Random(f"{family} {seed}")
    folder, base = checkpoint(family)
    adapter_folder, adapted = adapter(family)
    settings: dict[str, Any] = {
        "num_pages": draw.choice([70, 100, 160]),
        "max_num_seqs": draw.choice([2, 4]),
        "chunk_size": draw.choice([5, 16]),
        "max_num_batched_tokens": 32,
        "prefill_policy": draw.choice(["drain", "pipelined", "mixed"]),
        "speculative_tokens": draw.choice([0, 3]),
    }
    runtime = open_runtime(folder, lora_slots=1, lora_max_rank=2, debug=True, **settings)
    stems = [[draw.randrange(3, 320) for _ in range(n)] for n in (3, 20)]
    asked = []
    for _ in range(10):
        prompt = [*draw.choice(stems), *(draw.randrange(3, 320) for _ in range(draw.randrange(1, 12)))]
        asked.append((prompt, draw.randrange(1, 20), draw.random() < 0.3, draw.random() < 0.2))
    with Engine(runtime.config, runtime=runtime) as engine:
        handles = []
        for prompt, n, with_adapter, cancelled in asked:
            sampling = SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
            of = str(adapter_folder) if with_adapter else None
            handles.append(engine.submit(Request(prompt=prompt, sampling=sampling, adapter=of)))
            if cancelled:
                handles[-1].cancel()
        for (prompt, n, with_adapter, cancelled), handle in zip(asked, handles, strict=True):
            found = list(handle.result(timeout=300).token_ids)
            assert cancelled or len(found) == n
            wanted = oracle(adapted if with_adapter else base, prompt, len(found), found)
            assert found == wanted, settings
