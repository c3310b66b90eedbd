"""What is said of a model before it is loaded is what its runtime reports when it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.runtime import building
from petiole.gpu_worker.runtime.cpu import platform
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.runtime.sizing import Sizes, sizes_of

MEMORY = 2**30


def reported(config: EngineConfig, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a runtime says that is loaded where as much memory is free as the sizes suppose."""
    monkeypatch.setattr(platform, "host_memory_left", lambda: sizes.memory_bytes - sizes.weight_bytes)
    runtime = ModelRuntime(config)
    limits, cache = runtime.limits, runtime._memory.cache
    tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in (*cache.keys, *cache.values)}
    found = {
        "weight_bytes": limits.computing.weight_bytes,
        "weight_format": limits.computing.weight_format,
        "pages": limits.n_pages,
        "windows": tuple((window, pages) for window, pages in limits.windows),
        "snapshots": limits.snapshots,
        "rows": limits.max_batch_size - 1,
        "max_model_len": limits.max_model_len,
        "max_num_batched_tokens": limits.batching.max_num_batched_tokens,
        "kv_bytes": sum(tensor.untyped_storage().nbytes() for tensor in tensors.values()),
    }
    runtime.close()
    return found


def foreseen(sizes: Sizes) -> dict[str, Any]:
    same = ("weight_bytes", "weight_format", "pages", "snapshots", "rows", "max_model_len")
    return {name: getattr(sizes, name) for name in (*same, "max_num_batched_tokens")} | {
        "windows": tuple((group.window, group.pages) for group in sizes.windows if group.pages),
        "kv_bytes": sizes.pool_bytes - sizes.snapshots * sizes.snapshot_bytes,
    }


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("petiole-tiny", {}),
        ("petiole-tiny", {"weight_quantization": "int8", "max_num_seqs": 3}),
        ("petiole-tiny", {"weight_quantization": "int4", "lora_slots": 2, "lora_max_rank": 4}),
        ("petiole-tiny", {"prefix_cache": "block", "page_size": 16, "num_pages": 50}),
        ("petiole-tiny-vision", {}),
        ("petiole-tiny-embed", {}),
        ("gemma3", {"chunk_size": 8}),
        ("gemma4-experts", {"chunk_size": 8}),
        ("qwen3-moe", {"dtype": "bfloat16"}),
        ("qwen3.5", {}),
        ("lfm2", {"kv_dtype": "fp8"}),
        ("deepseek-v3", {"chunk_size": 8}),
    ],
)
def test_the_sizes_are_those_that_a_runtime_reports(
    model: str, settings: dict[str, Any], checkpoint: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = model if model.startswith("petiole") else str(checkpoint(model)[0])
    config = EngineConfig(model=name, device="cpu", **settings)
    sizes = sizes_of(config, MEMORY)
    assert foreseen(sizes) == reported(config, sizes, monkeypatch)
    assert sum(sizes.weights.values()) == sizes.weight_bytes
    assert sizes.tokens == (sizes.pages - 1) * sizes.page_size


@pytest.mark.parametrize("memory", [2**23, 2**25])
def test_little_memory_bounds_the_pages_as_in_a_runtime(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(device="cpu", max_num_seqs=4)
    sizes = sizes_of(config, memory, length=200)
    assert foreseen(sizes) == reported(config, sizes, monkeypatch)
    assert sizes.sequences == min(4, (sizes.pages - 1) // 200)
    assert sizes.bounded_by == ("num_pages" if sizes.sequences < 4 else "max_num_seqs")


def test_a_long_sequence_needs_no_more_of_a_window_than_it_sees(checkpoint: Callable[..., Any]) -> None:
    config = EngineConfig(model=str(checkpoint("gemma3")[0]), device="cpu", max_num_seqs=500, chunk_size=1)
    (group,) = sizes_of(config, MEMORY).windows
    assert group.window == 7
    few = EngineConfig(model=config.model, device="cpu", max_num_seqs=500, chunk_size=1, num_pages=1 + 2 * 256)
    sizes = sizes_of(few, MEMORY)
    assert (sizes.length, sizes.sequences, sizes.bounded_by) == (256, 2, "num_pages")


def test_a_configuration_alone_says_what_its_weights_would_take(tmp_path: Path) -> None:
    folder = resolve_model("petiole-tiny")
    shutil.copy(folder / "config.json", tmp_path)
    whole = sizes_of(EngineConfig(device="cpu"), MEMORY)
    for name in (tmp_path, tmp_path / "config.json", folder / "config.json"):
        alone = sizes_of(EngineConfig(model=str(name), device="cpu"), MEMORY)
        assert foreseen(alone) == foreseen(whole)


def test_a_hub_id_is_found_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model = tmp_path / "models--some--model"
    snapshot = of_model / "snapshots" / "1234"
    snapshot.mkdir(parents=True), (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text("1234")
    shutil.copy(resolve_model("petiole-tiny") / "config.json", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sizes = sizes_of(EngineConfig(model="some/model", device="cpu"), MEMORY)
    assert sizes.model == "some/model"
    assert foreseen(sizes) == foreseen(sizes_of(EngineConfig(device="cpu"), MEMORY))


def test_a_quantised_configuration_alone_is_refused(tmp_path: Path, checkpoint: Callable[..., Any]) -> None:
    text = (resolve_model("petiole-tiny") / "config.json").read_text()
    declared = '{"quantization_config": {"quant_method": "mxfp4"},' + text.strip().removeprefix("{")
    (tmp_path / "config.json").write_text(declared)
    with pytest.raises(
        ModelError, match=r"quant_method must be absent where there are no weight files.*got mxfp4$"
    ):
        sizes_of(EngineConfig(model=str(tmp_path), device="cpu"), MEMORY)


def test_a_card_that_is_not_here_is_planned_like_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="petiole-tiny-vision", device="cuda")
    sizes = sizes_of(config, 8 * MEMORY)
    from petiole.gpu_worker.runtime.cuda.platform import CudaPlatform

    left = sizes.memory_bytes - sizes.weight_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (left, sizes.memory_bytes))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"), kind="cuda")
    card = CudaPlatform(device)
    runtime = ModelRuntime(EngineConfig(model="petiole-tiny-vision", device="cpu", num_pages=64))
    settled = building.decided(config, runtime._info, runtime._decoder, card)
    pools = building.pools_of(settled, runtime._decoder, card)
    runtime.close()
    assert (sizes.pages, sizes.rows, sizes.device) == (pools.n_pages, settled.max_num_seqs, "cuda")
    assert sizes.windows == ()


@pytest.mark.parametrize(
    ("settings", "memory", "length", "error", "message"),
    [
        ({}, 2**20, None, MachineError, r"^memory: must be more than \d+ bytes, .*, got 1048576$"),
        ({}, MEMORY, 2049, InvalidRequest, r"^length: must be 1 to 2048, the longest sequence, got 2049$"),
        ({}, MEMORY, 0, InvalidRequest, r"^length: must be 1 to 2048, the longest sequence, got 0$"),
        (
            {"num_pages": 10**9},
            MEMORY,
            None,
            InvalidRequest,
            r"^num_pages: must be at most \d+ .*, got 1000000000$",
        ),
        (
            {"max_model_len": 9999},
            MEMORY,
            None,
            ModelError,
            r"^max_model_len: must be at most 2048, .*, got 9999$",
        ),
        (
            {"model": "nobody/has-this"},
            MEMORY,
            None,
            MachineError,
            r"must be a local folder or in the hub's cache",
        ),
        (
            {"model": "petiole-tiny-vision", "device": "cuda", "num_pages": 10**9},
            MEMORY * 8,
            None,
            InvalidRequest,
            r"^num_pages: must be at most \d+ on this card, got 1000000000$",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    settings: dict[str, Any], memory: int, length: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        sizes_of(EngineConfig(**{"device": "cpu", **settings}), memory, length)
