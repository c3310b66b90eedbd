"""Decode and prefill on the CPU: tokens a second beside transformers.

Random weights in the shapes of Qwen3-0.6B (bf16) and of a 6.8 M-parameter model (float32). Each side decodes the
same number of tokens after the same prompts; sides alternate in one run, on the same number of threads.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.driver import Driver
from bench.report import Report, arguments, compare
from gpu_worker.config import EngineConfig
from gpu_worker.runtime.runtime import ModelRuntime


@dataclass(frozen=True)
class Shape:
    """A model's shape and what is measured with it. `decode`: (batch, least ratio to transformers)."""

    name: str
    config: dict[str, Any]
    dtype: str
    prompt: int
    n_tokens: int
    decode: tuple[tuple[int, float], ...]
    prefill: tuple[int, float] | None


_COMMON = {"max_position_embeddings": 2048, "head_dim": 128, "tie_word_embeddings": True, "eos_token_id": None}
LARGE = Shape(
    name="Qwen3-0.6B shape, bf16",
    config=_COMMON
    | {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    dtype="bfloat16",
    prompt=128,
    n_tokens=12,
    decode=((1, 1.25), (8, 1.9), (16, 2.3)),
    prefill=(512, 1.1),
)
SMALL = Shape(
    name="6.8 M shape, fp32",
    config=_COMMON
    | {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    dtype="float32",
    prompt=64,
    n_tokens=64,
    decode=((1, 5.2), (8, 2.6), (32, 2.0)),
    prefill=None,
)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["large", "small"])
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report("Models on the CPU (output tokens a second; peer: transformers)")
    wanted = {"large": LARGE, "small": SMALL}
    if options.quick:
        wanted.pop("large")
    for key, shape in wanted.items():
        if options.only in (None, key):
            measure(shape, report, 2 if options.quick else options.rounds, options.threads)
    report.finish(options.json)


def measure(shape: Shape, report: Report, rounds: int, threads: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        peer = write_checkpoint(shape, Path(folder))
        most = max(batch for batch, _ in shape.decode)
        config = EngineConfig(
            model=folder,
            device="cpu",
            dtype=shape.dtype,  # type: ignore[arg-type]
            max_num_seqs=most,
            max_model_len=1024,
            num_threads=threads,
        )
        runtime = ModelRuntime(config)
        try:
            for batch, target in shape.decode:
                ours, theirs, spread = compare(
                    lambda b=batch: our_decode(runtime, shape, b),
                    lambda b=batch: peer_decode(peer, shape, b),
                    rounds=rounds,
                )
                name = f"{shape.name}, batch {batch}"
                report.add(name, ours, "tokens/s", peer=theirs, spread=spread, target=target)
            if shape.prefill is not None:
                length, target = shape.prefill
                ours, theirs, spread = compare(
                    lambda: our_prefill(runtime, length),
                    lambda: peer_prefill(peer, length),
                    rounds=max(2, rounds // 2),
                )
                name = f"{shape.name}, prefill {length}"
                report.add(name, ours, "tokens/s", peer=theirs, spread=spread, target=target)
        finally:
            runtime.close()


def write_checkpoint(shape: Shape, folder: Path) -> Any:
    """Random weights in transformers' format; returns the model of transformers over the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        model = Qwen3ForCausalLM(Qwen3Config(**shape.config)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model


def prompts(batch: int, length: int) -> list[list[int]]:
    return torch.randint(3, 8000, (batch, length), generator=torch.Generator().manual_seed(1)).tolist()


def our_decode(runtime: ModelRuntime, shape: Shape, batch: int) -> float:
    driver = Driver(runtime)
    sequences = [driver.sequence(p) for p in prompts(batch, shape.prompt)]
    driver.prefill(sequences)
    driver.decode_many(sequences, 2)
    return _rate(lambda: driver.decode_many(sequences, shape.n_tokens), batch * shape.n_tokens)


@torch.inference_mode()
def peer_decode(model: Any, shape: Shape, batch: int) -> float:
    out = model(torch.tensor(prompts(batch, shape.prompt)), use_cache=True, logits_to_keep=1)
    state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

    def steps(n: int) -> None:
        for _ in range(n):
            out = model(state["token"], past_key_values=state["cache"], use_cache=True)
            state["cache"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    steps(2)
    return _rate(lambda: steps(shape.n_tokens), batch * shape.n_tokens)


def our_prefill(runtime: ModelRuntime, length: int) -> float:
    driver = Driver(runtime)
    sequence = driver.sequence(prompts(1, length)[0])
    return _rate(lambda: driver.prefill([sequence]), length)


@torch.inference_mode()
def peer_prefill(model: Any, length: int) -> float:
    ids = torch.tensor(prompts(1, length))
    return _rate(lambda: model(ids, use_cache=True, logits_to_keep=1), length)


def _rate(work: Callable[[], object], tokens: int) -> float:
    start = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
