"""Decode on a CUDA device against the time to read its bytes, and prefill against the matrix rate.

Then a workload of many sequences, beside transformers' own continuous batching.

Floors come from two rates measured in the same run: a large copy on the device (bytes read plus written) and a
large bf16 matrix product. Weights are random; `--only` picks parts, each of which fits a few minutes.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.checkpoints import QWEN3_06B, Shape, config
from bench.driver import Driver
from bench.report import Report, arguments
from gpu_worker.config import EngineConfig
from gpu_worker.engine import Engine
from gpu_worker.request import Request, SamplingParams
from gpu_worker.runtime.runtime import ModelRuntime

QWEN3_8B = Shape("Qwen3-8B shape, bf16", "bfloat16", 151_936, 4096, 12_288, 36, 32, 8, 128, max_positions=16_384)
SMALL = Shape(QWEN3_06B.name, "bfloat16", 151_936, 1024, 3072, 28, 16, 8, 128, max_positions=4096)
CONTEXT = 512
PARTS = ("decode-8b", "decode-0.6b", "prefill-8b", "workload", "peer")


@dataclass(frozen=True)
class Card:
    bandwidth: float
    rate: float


class RandomWeights:
    """See `gpu_worker.models.loading.TensorSource`."""

    def __contains__(self, name: str) -> bool:
        return name != "lm_head.weight"

    def copy(self, name: str, into: Tensor) -> int:
        into.fill_(1.0) if "norm" in name else into.normal_(0, 0.02)
        return into.nbytes


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a CUDA device")
    report = Report("Models on a CUDA device")
    card = measure_card()
    report.add("copy on the device", card.bandwidth / 1e12, "TB/s")
    report.add("bf16 matrix product", card.rate / 1e12, "TFLOP/s")
    wanted = options.only or (["decode-0.6b"] if options.quick else list(PARTS))
    if "decode-8b" in wanted or "prefill-8b" in wanted:
        with opened(QWEN3_8B, max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=9216) as runtime:
            if "decode-8b" in wanted:
                decode(report, runtime, QWEN3_8B, card, {1: 1.2, 16: 1.2, 64: 1.2})
            if "prefill-8b" in wanted:
                prefill(report, runtime, QWEN3_8B, card)
        torch.cuda.empty_cache()
    if "decode-0.6b" in wanted:
        with opened(SMALL, max_num_seqs=64, max_model_len=4096) as runtime:
            decode(report, runtime, SMALL, card, {1: None, 16: None, 64: 1.6})
        torch.cuda.empty_cache()
    ours = workload(report) if "workload" in wanted or "peer" in wanted else 0.0
    if "peer" in wanted:
        peer(report, ours)
    report.finish(options.json)


class opened:  # noqa: N801 - reads as what it is, a context
    """A runtime of random weights, closed at the end."""

    def __init__(self, shape: Shape, **settings: object) -> None:
        self._folder = tempfile.TemporaryDirectory()
        (Path(self._folder.name) / "config.json").write_text(json.dumps(config(shape)))
        engine = EngineConfig(model=self._folder.name, device="cuda", dtype="bfloat16", **settings)  # type: ignore[arg-type]
        self.config = engine
        self._runtime = ModelRuntime(engine, source=RandomWeights())

    def __enter__(self) -> ModelRuntime:
        return self._runtime

    def __exit__(self, *_: object) -> None:
        self._runtime.close()
        del self._runtime
        self._folder.cleanup()


def seconds(work: Callable[[], object], rounds: int = 20) -> float:
    """Median by device events, after a warm-up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_card() -> Card:
    return Card(copy_bandwidth(), matrix_rate())


def copy_bandwidth() -> float:
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def matrix_rate(side: int = 8192) -> float:
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return float(2 * side**3 / seconds(lambda: a @ b, rounds=10))


def decode(
    report: Report, runtime: ModelRuntime, shape: Shape, card: Card, targets: dict[int, float | None]
) -> None:
    """Wall time of a step with two in flight, as the engine runs it."""
    for batch, target in targets.items():
        driver = Driver(runtime)
        sequences = [driver.sequence(tokens(CONTEXT)) for _ in range(batch)]
        for sequence in sequences:
            driver.prefill([sequence])
        driver.decode_many(sequences, 20)
        rounds = []
        for _ in range(5):
            start = time.perf_counter()
            driver.decode_many(sequences, 50)
            rounds.append((time.perf_counter() - start) / 50)
        context = sequences[0].length
        floor = shape.decode_bytes(batch, context) / card.bandwidth
        report.add(
            f"{shape.name}: decode step, batch {batch}, context {context}",
            statistics.median(rounds) * 1e3,
            "ms",
            floor=floor * 1e3,
            target=target,
            better="lower",
            samples=rounds,
        )


def prefill(report: Report, runtime: ModelRuntime, shape: Shape, card: Card, length: int = 8192) -> None:
    rounds = []
    for _ in range(5):
        driver = Driver(runtime)
        sequence = driver.sequence(tokens(length))
        start = time.perf_counter()
        driver.prefill([sequence])
        rounds.append(time.perf_counter() - start)
    operations = shape.operations(length, length / 2, 1)
    rate = operations / min(rounds)
    name = f"{shape.name}: prefill of {length}"
    report.add(name, rate / 1e12, "TFLOP/s", floor=card.rate / 1e12, target=0.55, samples=rounds)


def tokens(n: int) -> list[int]:
    return random.Random(n).choices(range(10, 150_000), k=n)


def requests() -> list[Request]:
    """256 sequences, 100 to 1,024 tokens in and out, as nano-vllm's benchmark draws them."""
    draw = random.Random(0)
    made = []
    for _ in range(256):
        prompt = [draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))]
        sampling = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=draw.randint(100, 1024))
        made.append(Request(prompt=prompt, sampling=sampling))
    return made


def workload(report: Report) -> float:
    context = opened(SMALL, max_num_seqs=256, max_num_batched_tokens=16_384, chunk_size=4096, max_model_len=4096)
    with context as runtime:
        engine = Engine(context.config, runtime=runtime)
        with engine:
            engine.generate([Request(prompt=tokens(64), sampling=SamplingParams(max_tokens=8, ignore_eos=True))])
            wanted = requests()
            start = time.perf_counter()
            results = engine.generate(wanted)
            elapsed = time.perf_counter() - start
    produced = sum(r.usage.completion_tokens for r in results)
    report.add(
        f"256 sequences, {produced} tokens out, {SMALL.name}", produced / elapsed, "tokens/s", target=24_000
    )
    torch.cuda.empty_cache()
    return produced / elapsed


def peer(report: Report, ours: float) -> None:
    """transformers' continuous batching over the same prompts (a quarter of them: it is slow)."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    shape = {k: v for k, v in config(SMALL).items() if k not in ("architectures", "model_type", "torch_dtype")}
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).to("cuda").eval()
    torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("sdpa_paged")
    prompts = [list(r.prompt) for r in requests()[:64]]  # type: ignore[arg-type]
    settings = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=None, use_cuda_graph=False)
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=prompts, generation_config=settings)
    elapsed = time.perf_counter() - start
    produced = sum(len(output.generated_tokens) for output in outputs.values())
    report.add("throughput beside transformers", ours, "tokens/s", peer=produced / elapsed, target=4.0)


if __name__ == "__main__":
    main()
