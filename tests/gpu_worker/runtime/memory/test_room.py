"""What a setting would take is compared with the memory that is free, before any of it is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.runtime.cpu import platform
from petiole.gpu_worker.runtime.memory.kv import decide_n_pages
from petiole.gpu_worker.runtime.runtime import ModelRuntime


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_num_seqs": 100_000}, "max_num_seqs"),
        ({"max_num_seqs": 1_000, "speculative_tokens": 1024}, "max_num_seqs"),
        ({"lora_slots": 10_000}, "lora_slots"),
        ({"lora_slots": 1, "lora_max_rank": 100_000}, "lora_max_rank"),
        ({"num_pages": 1_000_000}, "num_pages"),
    ],
)
def test_what_there_is_no_room_for_is_refused_by_name(
    settings: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "free_bytes", lambda *_: 2**30)
    refused = rf"^{field}: must be at most \d+ in \d+ bytes .*, got {settings[field]}$"
    with pytest.raises(InvalidRequest, match=refused):
        ModelRuntime(EngineConfig(device="cpu", **settings))


@pytest.mark.parametrize(
    ("on_cuda", "n_pages"),
    [
        (True, 2**30 // 64),  # though four sequences need but 401
        (False, 4 * 100 + 1),
    ],
)
def test_the_pool_of_a_gpu_takes_all_that_is_left(on_cuda: bool, n_pages: int) -> None:
    model: Any = SimpleNamespace(kv_elements_per_token=32)
    sizes = {"max_model_len": 100, "bytes_per_element": 2, "free_bytes": 2**30}
    assert decide_n_pages(EngineConfig(max_num_seqs=4), model, on_cuda=on_cuda, **sizes) == n_pages


def test_as_many_rows_as_said_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "free_bytes", lambda *_: 2**25)
    with pytest.raises(InvalidRequest) as caught:
        ModelRuntime(EngineConfig(device="cpu", max_num_seqs=10_000, num_pages=2))
    most = int(caught.value.limit.split()[4])
    ModelRuntime(EngineConfig(device="cpu", max_num_seqs=most, num_pages=2)).close()
