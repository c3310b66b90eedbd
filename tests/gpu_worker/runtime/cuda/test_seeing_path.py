"""Pictures of towers on the CUDA path (positions of three axes, deep features, layers that look ahead and others
that do not, captured decodes behind them) give the CPU's answers, on a device that computes as late as it may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.text import load_tokenizer
from tests.support import fake_flashinfer, late_device
from tests.support.late_device import LateDevice
from tests.support.seeing import PAD, as_file, drawn_picture, write_seeing

FILES = [as_file(drawn_picture(*size, seed=k)) for k, size in enumerate([(170, 100), (64, 64), (60, 200)])]
PROMPTS = [([7, PAD, 8, 9], [0]), ([PAD, 5, PAD, 6, 7], [1, 2]), ([3, 4, 5], []), ([7, PAD, 8, 10], [0])]


def requests() -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    return [Request(prompt=ids, images=[FILES[k] for k in of], sampling=sampling) for ids, of in PROMPTS]


@pytest.mark.parametrize(
    ("name", "chunk", "policy"),
    [
        ("qwen3-vl", 5, "pipelined"),
        ("qwen2.5-vl", 0, "mixed"),
        ("gemma3", 20, "pipelined"),
        ("gemma4", 80, "mixed"),
        ("smolvlm", 9, "mixed"),
    ],
)
def test_answers_are_those_of_the_cpu(
    name: str, chunk: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_seeing(tmp_path, name)
    small = {
        "num_pages": 800,
        "max_num_seqs": 4,
        "num_threads": 1,
        "graph_batch_sizes": (4,),
        "max_model_len": 256,
    }
    config = EngineConfig(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        chunk_size=chunk,
        prefill_policy=policy,
        debug=True,
        **small,  # type: ignore[arg-type]
    )
    with Engine(config) as engine:
        expected = [result.token_ids for result in engine.generate(requests())]
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    fake_flashinfer.install(monkeypatch)
    late_device.install(monkeypatch)
    runtime: Any = late_device.late_runtime(ModelRuntime(config, device=LateDevice()))  # type: ignore[arg-type]
    with Engine(config, runtime=runtime, tokenizer=load_tokenizer(tmp_path)) as engine:
        assert [result.token_ids for result in engine.generate(requests())] == expected
        assert not runtime._features
