"""An engine's settings: what cannot work is refused by name before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.contract.settings.engine import BATCHING, Batching
from petiole.gpu_worker import EngineConfig, InvalidRequest


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 10**20}, f"max_num_seqs: must be 0 to 2147483647, got {10**20}"),
        ({"chunk_size": -1}, "chunk_size: must be 0 to 2147483647, got -1"),
        ({"lora_slots": 2**31}, "lora_slots: must be 0 to 2147483647, got 2147483648"),
        ({"lora_max_rank": 0}, "lora_max_rank: must be 1 to 2147483647, got 0"),
        ({"speculative_tokens": 1025}, "speculative_tokens: must be 0 to 1024, got 1025"),
        ({"num_threads": 100_000}, "num_threads: must be 0 to 1024, got 100000"),
        ({"num_pages": 1}, "num_pages: must be 0, or 2 to 2147483647, got 1"),
        ({"max_model_len": 1}, "max_model_len: must be 0, or 2 to 2147483647, got 1"),
        ({"graph_batch_sizes": (4, 0)}, "graph_batch_sizes: must each be at least 1, got (4, 0)"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization: must be above 0 and at most 1, got 0.0"),
        ({"stream_interval_ms": float("inf")}, "stream_interval_ms: must be 0 to 1000000, got inf"),
        ({"stream_interval_ms": float("nan")}, "stream_interval_ms: must be 0 to 1000000, got nan"),
        ({"prefix_cache_max_pages": -1}, "prefix_cache_max_pages: must be 0 to 2147483647, got -1"),
        ({"max_waiting": 0}, "max_waiting: must be at least 1, got 0"),
        ({"model": ""}, "model: must have at least 1 character, got "),
        ({"prefix_cache": "block", "page_size": 7}, "page_size: must be 1 or a multiple of 16 with .*, got 7"),
    ],
)
def test_an_unfit_setting_is_refused_with_its_limit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message.replace("(", r"\(").replace(")", r"\)") + "$"):
        EngineConfig(**settings)


@pytest.mark.parametrize("settings", [{"num_pages": 2}, {"max_model_len": 2}, {"num_threads": 1024}])
def test_the_limits_themselves_are_taken(settings: dict[str, Any]) -> None:
    EngineConfig(**settings)


def test_what_is_not_set_is_decided_by_the_device() -> None:
    assert EngineConfig().decided(BATCHING["cpu"]).batching == Batching(64, 2048, 512)
    assert EngineConfig().decided(BATCHING["cuda"]).batching == Batching(256, 8192, 2048)


def test_chunks_of_mixed_steps_are_short() -> None:
    mixed = EngineConfig(prefill_policy="mixed").decided(BATCHING["cuda"])
    assert mixed.batching == Batching(256, 8192, 512)


def test_what_is_set_stays() -> None:
    assert EngineConfig(chunk_size=7).decided(BATCHING["cuda"]).batching == Batching(256, 8192, 7)
    decided = EngineConfig(max_num_seqs=3, max_num_batched_tokens=4).decided(BATCHING["cpu"])
    assert decided.decided(BATCHING["cuda"]) == decided


def test_drafts_may_be_off_whatever_their_number() -> None:
    assert EngineConfig(drafts="off", speculative_tokens=4).speculative_tokens == 0
    assert EngineConfig(drafts="ngram", speculative_tokens=4).speculative_tokens == 4
