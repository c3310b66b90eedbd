"""What CUDA decides before the executor is made, over a device that is only pretended."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petiole.contract.settings.engine import BATCHING
from petiole.gpu_worker import EngineConfig
from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.runtime.building import pools_of
from petiole.gpu_worker.runtime.cpu.platform import CpuPlatform
from petiole.gpu_worker.runtime.cuda.executor import working_bytes
from petiole.gpu_worker.runtime.cuda.platform import CudaPlatform
from petiole.gpu_worker.runtime.derived_settings import quantization
from petiole.gpu_worker.runtime.memory.room import page_bytes, pool_bytes
from petiole.gpu_worker.runtime.platforms import Platform

FREE = 8 * 2**30


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> CudaPlatform:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (FREE, FREE))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return of_card((9, 0), monkeypatch)


def of_card(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> CudaPlatform:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 3), kind="cuda", new_stream=lambda name: name)
    return CudaPlatform(device)


def test_what_an_older_card_cannot_compute_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[..., Any], open_runtime: Callable[..., Any]
) -> None:
    plan = open_runtime(checkpoint("qwen3")[0])._decoder.plan
    with pytest.raises(MachineError, match=r"compute capability: must be at least 8\.0, got 7\.5"):
        of_card((7, 5), monkeypatch).require(plan)
    wanted = EngineConfig(weight_quantization="fp8")
    assert quantization(wanted, of_card((8, 9), monkeypatch)) == "fp8"
    with pytest.raises(ModelError, match="weight_quantization: must be none, int4 on this card, got fp8"):
        quantization(wanted, of_card((8, 6), monkeypatch))


def test_its_tensors_are_where_the_device_is(platform: CudaPlatform) -> None:
    assert platform.place == torch.device("cuda", 3)


def test_results_are_copied_by_a_stream_of_their_own(platform: CudaPlatform) -> None:
    compute: Any = "compute"
    assert platform.copy_stream(compute) == "copy"


def test_pages_get_what_working_memory_leaves(
    platform: CudaPlatform, checkpoint: Callable[..., Any], open_runtime: Callable[..., Any]
) -> None:
    decoder = open_runtime(checkpoint("qwen3")[0])._decoder
    config = platform.decided(EngineConfig(max_model_len=64, gpu_memory_utilization=1.0), decoder)
    assert config.batching == BATCHING["cuda"]
    working = working_bytes(config, decoder.plan, decoder.dtype.itemsize)
    n_pages = platform.n_pages(config, decoder, torch.float16)
    page_bytes = 2 * decoder.plan.kv_elements_per_token
    assert n_pages == (FREE - working) // page_bytes


def test_layers_with_a_window_leave_their_pages_to_the_others(
    platform: CudaPlatform, checkpoint: Callable[..., Any], open_runtime: Callable[..., Any]
) -> None:
    """As many pages as fit, of all pools together; with a window of seven positions, a quarter as many."""
    decoder = open_runtime(checkpoint("gemma3")[0])._decoder
    config = platform.decided(EngineConfig(max_model_len=4096, gpu_memory_utilization=1.0), decoder)
    pools = pools_of(config, decoder, platform)
    left = FREE - working_bytes(config, decoder.plan, decoder.dtype.itemsize)
    fits = [
        pool_bytes(config, decoder.plan, pools.dtype.itemsize, pools.n_pages + more) <= left for more in (0, 1)
    ]
    assert fits == [True, False]
    assert list(pools.windows) == [(7, -(-pools.n_pages // 4))]
    of_layers = [i for i, window in enumerate(decoder.plan.kept_windows) if window]
    share = 1 - 3 / 4 * len(of_layers) / decoder.plan.n_layers
    assert pools.n_pages == pytest.approx(
        left / page_bytes(config, decoder.plan, pools.dtype.itemsize) / share, rel=0.01
    )


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_kept_features_of_pictures_are_in_the_books(
    kind: str, platform: CudaPlatform, open_runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside pages that are chosen, and beside pages that are given."""
    free, largest = 2**31, 2**31 - 1
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, free))
    decoder = open_runtime("petiole-tiny-vision")._decoder
    one: Platform = platform if kind == "cuda" else CpuPlatform(platform.device, lambda: free)
    least: dict[str, Any] = {"max_model_len": 64, "gpu_memory_utilization": 1.0, "max_num_seqs": 2}

    def pages(cache: int, given: int = 0) -> int:
        config = one.decided(EngineConfig(image_cache_bytes=cache, num_pages=given, **least), decoder)
        return one.n_pages(config, decoder, torch.float16)

    most = free // (2 * decoder.plan.kv_elements_per_token)
    assert pages(0, most // 4) == pages(free // 4, most // 4) == most // 4
    with pytest.raises(ValueError, match="num_pages: must be at most"):
        pages(free - free // 4, most // 4 + 1)
    said = f"no memory for the KV cache.*image_cache_bytes {largest} and lora_slots 0: lower these"
    with pytest.raises(MachineError, match=said):
        pages(largest)


def test_both_platforms_answer_the_same_questions(platform: CudaPlatform) -> None:
    device: Any = SimpleNamespace(kind="cpu")
    for one in (platform, CpuPlatform(device)):
        typed: Platform = one
        assert "none" in typed.quantizations
        assert typed.dtypes
