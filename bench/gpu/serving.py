"""Many sequences at once on a CUDA device: a published workload, and other servers on the same card."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.engine import chunks
from bench.gpu.card import QWEN3_8B, SMALL, Card, opened, release, tokens
from bench.harness import load
from bench.harness.checkpoints.decoders import Shape, config
from bench.harness.load import settle
from bench.harness.report import NotAvailableError, Report, compare
from bench.peers import vllm_peer
from petiole.contract.settings.engine import BATCHING, MIXED_CHUNK_SIZE
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.request import Request, SamplingParams

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 16_384,
    "chunk_size": 4096,
    "max_model_len": 4096,
}


def published(seed: int = 0) -> list[Request]:
    """256 sequences, 100 to 1,024 tokens in and out, as nano-vllm's benchmark draws them with seed 0."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return [
        Request(
            prompt=prompt,
            sampling=SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(100, 1024)),
        )
        for prompt in prompts
    ]


def throughput(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    """(output tokens a second, output tokens)"""
    start = time.perf_counter()
    results = engine.generate(requests)
    elapsed = time.perf_counter() - start
    produced = sum(result.usage.completion_tokens for result in results)
    return produced / elapsed, produced


def alone(requests: list[Request], **more: Any) -> tuple[float, int]:
    """`throughput` of an engine of its own, whose prefix cache knows none of the prompts."""
    context = opened(SMALL, **SETTINGS | more)
    with context as runtime, Engine(context.config, runtime=runtime) as engine:
        engine.generate(FIRST)
        return throughput(engine, requests)


def workload(report: Report, card: Card) -> None:
    rate, produced = alone(published())
    report.add(f"256 sequences, {produced} tokens out, {SMALL.name}", rate, "tokens/s", target=24_000, card="H200")


def workload_fp8(report: Report, card: Card) -> None:
    """With keys and values in eight bits, the larger part of what its steps read."""
    rate, produced = alone(published(), kv_dtype="fp8")
    name = f"256 sequences, {produced} tokens out, {SMALL.name}, keys and values in eight bits"
    report.add(name, rate, "tokens/s", target=24_000, card="H100")


def beside_mixed(report: Report, card: Card) -> None:
    """Prefill policies with their own chunks, by Poisson arrivals at 75 % of what `pipelined` can do."""
    rate, found = 0.0, dict[chunks.Variant, list[load.Run]]()
    for policy, size in (("pipelined", BATCHING["cuda"].chunk_size), ("mixed", MIXED_CHUNK_SIZE)):
        rate, found[policy, size] = arrivals(policy, size, rate)
        release()
    chunks.compare(report, f"{QWEN3_8B.name}: ", found, next(iter(found)))


def arrivals(policy: str, size: int, rate: float) -> tuple[float, list[load.Run]]:
    """rate: requests a second; 0: 75 % of what this policy can do, which is returned. A function of its own, so
    that nothing refers to the engine when its memory is released."""
    context = opened(QWEN3_8B, prefill_policy=policy, chunk_size=size, max_model_len=4096, prefix_cache="off")
    with context as runtime, Engine(context.config, runtime=runtime) as engine:
        engine.generate(FIRST)
        if not rate:
            asked = chunks.requests(256, 0, 512, 128)
            rate = chunks.SHARE * load.at_concurrency(engine, asked, len(asked)).requests_per_s
        return rate, [load.poisson(engine, chunks.requests(256, seed, 512, 128), rate, seed) for seed in range(2)]


FIRST = [Request(prompt=tokens(64), sampling=SamplingParams(max_tokens=8, ignore_eos=True))]
"""Figures that are computed once, by the side that serves first."""


def beside_vllm(report: Report, card: Card) -> None:
    """The published workload, and few sequences of a larger model."""
    try:
        vllm_peer.require()
    except NotAvailableError as error:
        report.absent["vllm"] = str(error)
        return
    turns(report, SMALL, {"256 sequences of 100 to 1,024 tokens in and out": published})
    release()
    sizes = (1, 16, 64)
    turns(report, QWEN3_8B, {f"{n} at once, some 512 in, 128 out": partial(_equal, n) for n in sizes})


def _equal(n: int, seed: int) -> list[Request]:
    return chunks.requests(n, seed, 512, 128)


def turns(
    report: Report, shape: Shape, loads: dict[str, Callable[[int], list[Request]]], memory: float = 0.4
) -> None:
    """Each load, drawn anew for each round, by both sides in turns; each side has `memory` of the card."""
    context = opened(shape, gpu_memory_utilization=memory, **SETTINGS)
    limits = {"max_model_len": context.config.max_model_len, "max_num_seqs": context.config.max_num_seqs}
    with context as runtime, Engine(context.config, runtime=runtime) as engine:
        peer = vllm_peer.Vllm(context.folder, dtype=shape.dtype, memory=memory, **limits)
        engine.generate(FIRST)
        peer.throughput(FIRST)
        settle()
        for load_name, drawn in loads.items():
            ours, theirs = itertools.count(1), itertools.count(1)
            value, other, spread = compare(
                lambda drawn=drawn, seeds=ours: throughput(engine, drawn(next(seeds)))[0],  # type: ignore[misc]
                lambda drawn=drawn, seeds=theirs: peer.throughput(drawn(next(seeds))),  # type: ignore[misc]
                rounds=3,
            )
            report.add(f"{load_name}, {shape.name}; peer: vLLM", value, "tokens/s", peer=other, spread=spread)
        peer.close()


def equal_lengths() -> list[Request]:
    """The same prompts with 256 output tokens each, for a peer that has no limit for each request."""
    sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=256)
    return [dataclasses.replace(request, sampling=sampling) for request in published()]


def beside_transformers(report: Report, card: Card) -> None:
    ours, _ = alone(equal_lengths())
    name = "256 sequences, 256 tokens out of each"
    report.add(name, ours, "tokens/s")
    release()
    theirs = peer([list(r.prompt) for r in equal_lengths()], 256)  # type: ignore[arg-type]
    report.add(f"{name}; peer: transformers", ours, "tokens/s", peer=theirs, target=4.0)


def peer(prompts: list[list[int]], n_tokens: int) -> float:
    """Output tokens a second, without the peer's own warm-up."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    shape = {k: v for k, v in config(SMALL).items() if k not in ("architectures", "model_type", "torch_dtype")}
    settings = Qwen3Config(**shape)
    settings._attn_implementation = "sdpa"
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(settings).to(torch.bfloat16).eval()
    model.set_attn_implementation("paged|sdpa")
    settle()
    generation = GenerationConfig(max_new_tokens=n_tokens, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch(inputs=prompts, generation_config=generation).values()
    return peer_rate(list(outputs), len(prompts) * n_tokens)


def peer_rate(outputs: Sequence[Any], n_tokens: int) -> float:
    """Output tokens a second of transformers' `GenerationOutput`s, which hold `n_tokens` unless some failed."""
    produced = sum(len(o.generated_tokens) for o in outputs)
    if produced < n_tokens:
        errors = {o.error for o in outputs if o.error}
        raise RuntimeError(f"transformers made {produced} of {n_tokens} tokens; errors: {errors or 'none'}")
    first, last = min(o.lifespan[0] for o in outputs), max(o.lifespan[1] for o in outputs)
    return produced / (last - first)
