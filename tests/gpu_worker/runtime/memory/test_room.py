"""What a setting would take is compared with the memory that is free, before any of it is taken."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.runtime.cpu import platform
from petiole.gpu_worker.runtime.runtime import ModelRuntime


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_num_seqs": 100_000}, "max_num_seqs"),
        ({"max_num_seqs": 1_000, "speculative_tokens": 1024, "drafts": "ngram"}, "max_num_seqs"),
        ({"lora_slots": 10_000}, "lora_slots"),
        ({"lora_slots": 1, "lora_max_rank": 100_000}, "lora_max_rank"),
        ({"num_pages": 1_000_000}, "num_pages"),
    ],
)
def test_what_there_is_no_room_for_is_refused_by_name(
    settings: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "host_memory_left", lambda: 2**30)
    refused = rf"^{field}: must be at most \d+ in \d+ bytes .*, got {settings[field]}$"
    with pytest.raises(InvalidRequest, match=refused):
        ModelRuntime(EngineConfig(device="cpu", **settings))


def test_the_pool_of_a_cpu_takes_no_more_than_its_sequences_need() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=100)
    assert platform.default_pages(config, lambda room: room // 64, 2**30) == 4 * 100 + 1


def test_as_many_rows_as_said_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "host_memory_left", lambda: 2**25)
    with pytest.raises(InvalidRequest) as caught:
        ModelRuntime(EngineConfig(device="cpu", max_num_seqs=10_000, num_pages=2))
    most = int(caught.value.limit.split()[4])
    ModelRuntime(EngineConfig(device="cpu", max_num_seqs=most, num_pages=2)).close()
