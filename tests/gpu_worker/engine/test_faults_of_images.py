"""Random requests with images, and faults of the host at any call: each ends one request at most, changes no token
and leaves no embedding behind.

`PETIOLE_STRESS_SEED` and `PETIOLE_STRESS_WORKLOADS` set the first seed and the number."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest

from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.scheduling.priorities import admission
from tests.gpu_worker.engine.test_images import OpenEngine, asked, expected, image, open_engine as open_engine
from tests.gpu_worker.engine.test_stress import wait_until_released
from tests.support.swept import Swept, at_random, is_injected
from tests.support.toy_decoder import LeadingToyDecoder, SeeingToyDecoder

SEED = int(os.environ.get("PETIOLE_STRESS_SEED", "1"))
WORKLOADS = int(os.environ.get("PETIOLE_STRESS_WORKLOADS", "12"))
MOST = 8
"""Requests of a workload."""


def parts_of(rng: random.Random, leading: bool, pictures: list[PreparedImage]) -> list[int | PreparedImage]:
    """A prompt: text, and images that other prompts may have, too."""
    text = lambda: [rng.randrange(1, 12) for _ in range(rng.randint(1, 12))]  # noqa: E731
    if leading:
        return [1, *rng.sample(pictures, rng.randint(0, 1)), *text()]
    return [1, *(one for picture in rng.choices(pictures, k=rng.randint(0, 3)) for one in (picture, *text())), 2]


def harmed(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, seed: int, often: float) -> Counter[str]:
    rng = random.Random(seed)
    kind = rng.choice([SeeingToyDecoder, SeeingToyDecoder, LeadingToyDecoder])
    cache = rng.choice(["radix", "radix", "block", "off"])
    machine = {
        "prefix_cache": cache,
        "page_size": {"radix": 1, "block": rng.choice([1, 16]), "off": rng.choice([1, 4])}[cache],
        "chunk_size": rng.choice([21, 30, 512]),
        "prefill_policy": rng.choice(["pipelined", "drain", "mixed"]),
        "pipeline": rng.choice(["on", "off"]),
        "prefix_cache_max_pages": rng.choice([None, None, 0, 10]),
    }
    monkeypatch.setattr(admission, "RUN_TOKENS", rng.choice([1, 3, 21, 64]))
    pictures = [image(100 * seed + k, rng.randint(1, 20)) for k in range(3)]
    prompts = [parts_of(rng, kind is LeadingToyDecoder, pictures) for _ in range(rng.randint(3, MOST))]
    lengths = [rng.choice([1, 5, 12, 30]) for _ in prompts]
    failed = 0
    with open_engine(kind, **machine) as engine, monkeypatch.context() as patch:
        swept = Swept(engine, at_random(seed, often))
        swept.patch_classes(patch)
        handles = [engine.submit(asked(parts, n)) for parts, n in zip(prompts, lengths, strict=True)]
        cancelled = [handle for handle in handles if rng.random() < 0.1 and not handle.cancel()]
        for parts, n, handle in zip(prompts, lengths, handles, strict=True):
            try:
                found, want = handle.result(timeout=60).token_ids, expected(parts, n)
                assert found == (want[: len(found)] if handle in cancelled else want)
            except Exception as error:
                if not is_injected(error):
                    raise
                failed += 1
        wait_until_released(engine)
        engine.check_invariants()
        runtime: Any = engine.runtime
        runtime._stream.synchronize()
        assert not runtime._features, "embeddings are dropped"
        assert engine.failure is None, engine.failure
    assert failed <= swept.raised.total(), "a fault ends one request at most"
    return swept.raised


def test_faults_of_the_host_beside_images(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    raised = Counter[str]()
    for seed in range(SEED, SEED + WORKLOADS):
        try:
            raised += harmed(open_engine, monkeypatch, seed, often=0.002)
        except BaseException:
            print(f"PETIOLE_STRESS_SEED={seed} PETIOLE_STRESS_WORKLOADS=1")
            raise
    print(f"{WORKLOADS} workloads, {raised.total()} faults at {len(raised)} places")
    assert len(raised) > min(WORKLOADS, 50), "faults at many places"
