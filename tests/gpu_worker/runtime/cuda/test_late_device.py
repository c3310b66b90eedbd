"""The CUDA path on a device that computes as late as it may: no buffer is filled again too early."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.exceptions import EngineError
from petiole.gpu_worker.runtime.memory import kv_tier
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.speculation import Launched, Price
from tests.gpu_worker.models.test_generation import oracle
from tests.gpu_worker.models.test_logits import tokens
from tests.support import fake_flashinfer, late_device
from tests.support.late_device import LateDevice, LateStream

N_TOKENS = 10
PROMPTS = [tokens(3 + 5 * i, i) for i in range(6)]


class Guesses:
    """Drafts that seldom hold, for every sequence and whenever it may have some. A proposer and a drafter."""

    def drafter(self, tokens: Sequence[int]) -> Guesses:
        return self

    def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
        pass

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return 8

    def rests(self, price: Price, *, in_flight: bool) -> int:
        return 0

    def expects(self, n: int) -> float:
        return 8

    def propose(self, count: int, launched: Launched | None = None) -> Sequence[int]:
        return [9, 9, 9][:count]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    fake_flashinfer.install(monkeypatch)
    late_device.install(monkeypatch)

    def get(folder: Path, **settings: Any) -> Engine:
        defaults = {
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 4,
            "num_pages": 400,
            "graph_batch_sizes": (4,),
        }
        config = EngineConfig(model=str(folder), **defaults | settings)
        runtime = ModelRuntime(config, device=LateDevice())  # type: ignore[arg-type]
        return Engine(config, runtime=late_device.late_runtime(runtime), proposer=Guesses())

    return get


def answers(engine: Engine, **sampling: Any) -> list[list[int]]:
    asked = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, **{"temperature": 0.0, **sampling})
    results = engine.generate(
        [Request(prompt=prompt, sampling=asked, request_id=str(prompt)) for prompt in PROMPTS]
    )
    return [list(result.token_ids) for result in results]


def test_nothing_is_computed_before_somebody_waits() -> None:
    stream = LateStream("compute")
    pinned, device = torch.ones(3), torch.zeros(3)

    def copy_and_add() -> None:
        device.copy_(pinned, non_blocking=True)
        device.add_(device.sum())

    stream.enqueue(copy_and_add)
    event = stream.record()
    pinned.fill_(2.0)  # too early
    assert device.tolist() == [0, 0, 0]
    stream.enqueue(lambda: device.zero_())
    event.synchronize()
    assert device.tolist() == [8, 8, 8], "what it holds now, and not what follows the event"


@pytest.mark.parametrize(
    ("page_size", "policy", "drafts"),
    [(1, "pipelined", 0), (16, "pipelined", 3), (16, "mixed", 0), (1, "mixed", 3)],
)
def test_the_tokens_are_those_of_transformers(
    page_size: int, policy: str, drafts: int, checkpoint: Any, late: Any
) -> None:
    folder, model = checkpoint("qwen3")
    cache = "radix" if page_size == 1 else "block"
    settings = {"page_size": page_size, "prefix_cache": cache, "prefill_policy": policy, "chunk_size": 8}
    with late(folder, speculative_tokens=drafts, **settings) as engine:
        assert answers(engine) == [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]
        assert (engine.stats()["draft_tokens"] > 0) == (drafts > 0)
        compute = engine.runtime._stream
    assert compute.waits == 0, "the host waits for data at a commit alone"


def test_drawn_tokens_are_those_of_the_blocking_engine(checkpoint: Any, late: Any) -> None:
    sampling = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}, "seed": 3}
    found = []
    for pipeline in ("on", "off"):
        with late(checkpoint("qwen3")[0], pipeline=pipeline, prefix_cache="off") as engine:
            found.append(answers(engine, **sampling))
    assert found[0] == found[1]


@pytest.mark.parametrize("page_size", [1, 16])
def test_kv_that_is_copied_to_files_and_back_changes_no_token(
    page_size: int, checkpoint: Any, late: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are evicted and filled anew all the time; a copy that comes too late finds another sequence's KV."""
    monkeypatch.setattr(kv_tier, "CHUNK", 4)
    monkeypatch.setattr(kv_tier, "LONGEST_WAIT_S", 60.0)
    monkeypatch.setattr(kv_tier.KVTier, "on_prefill", lambda *_: None)
    folder, model = checkpoint("qwen3")
    settings = {"page_size": page_size, "prefix_cache": "radix" if page_size == 1 else "block", "chunk_size": 8}
    wanted, restored = [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS], []
    for ring in (1, 2**28):
        monkeypatch.setattr(kv_tier, "RING_BYTES", ring)
        with late(folder, kv_tier=str(tmp_path / "kv"), num_pages=1 + 96 // page_size, **settings) as engine:
            assert answers(engine) == wanted
            assert answers(engine) == wanted
            restored.append(engine.stats()["kv_tier_restored_tokens"])
            assert engine.runtime._stream.waits == 0
    assert restored[-1] > 0


def test_a_buffer_that_both_slots_fill_is_found_out(checkpoint: Any, late: Any) -> None:
    """Broken on purpose: a step's staging overwrites the one before, which its copy has not read. Tokens are
    wrong, or a row has a query and no page."""
    folder, model = checkpoint("qwen3")
    with late(folder) as engine:
        slots = engine.runtime._executor._slots
        for layout, graphs in slots[1].graphs.items():
            graphs._buffers = slots[0].graphs[layout]._buffers
        found = None
        with contextlib.suppress(EngineError):
            found = answers(engine)
        assert found != [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]
