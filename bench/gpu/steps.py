"""Decode on a CUDA device against the time to read its bytes, and prefill against the matrix rate.

Also measured: the time that the device waits between two steps, where a step's time goes, and a workload of many
sequences, beside transformers' own continuous batching and, if it is installed, vLLM.

Floors come from two rates measured at the start of the call: a large copy on the device (bytes read plus written)
and a large bf16 matrix product. Weights are random. `--only` picks parts. Figures of other parts that the same
commit has measured on the same card stay in the file (`bench.harness.parts`). With PETIOLE_CUDA_GRAPHS=off
decodes run eagerly, and with PETIOLE_UNTIMED by kernels that are not the default; these figures stand beside the
others."""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from bench.engine.groups import QWEN35_SIZES, WITH_STATES, Counted
from bench.gpu.attention import attending
from bench.gpu.card import (
    GRAPHS,
    QWEN3_8B,
    SMALL,
    Card,
    captured_seconds,
    copy_bandwidth,
    matrix_rate,
    opened,
    release,
    seconds,
    tokens,
    untimed,
)
from bench.gpu.codes import coding
from bench.gpu.layers import layering
from bench.gpu.rules import LENGTHS, ruling, ways
from bench.gpu.serving import beside_mixed, beside_transformers, beside_vllm, workload, workload_fp8
from bench.gpu.vision import images, questions
from bench.harness.checkpoints.decoders import Described, Shape, config
from bench.harness.checkpoints.random_weights import FourBitWeights, RandomWeights
from bench.harness.driver import Driver, Stream
from bench.harness.parts import Parts, apart, failed, measured, read
from bench.harness.report import Report, arguments, table
from bench.models.mixtures import QWEN3_30B
from petiole.contract.settings.engine import switch
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.request import Request, SamplingParams
from petiole.gpu_worker.runtime.runtime import ModelRuntime

CONTEXT = 512
QWEN35_08B = Shape(
    "Qwen3.5-0.8B shape, bf16", "bfloat16", 248_320, 1024, 3584, 24, 8, 2, 256, max_positions=16_384
)
CEILINGS = "ceilings"
UNTIMED = switch("untimed")
VARIANT = ("" if GRAPHS == "on" else ", eager") + ("" if UNTIMED == "off" else f", untimed kernels {UNTIMED}")
CUT_OFF = "cut off"
BANDWIDTH, RATE = "copy on the device", "bf16 matrix product"


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="may be given several times")
    parser.add_argument(
        "--limit", type=float, default=180, metavar="S", help="seconds for each part (default 180)"
    )
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="S", help="seconds for all parts together"
    )
    parser.add_argument("--missing", action="store_true", help="only the parts that the file does not have yet")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a CUDA device")
    began = time.monotonic()
    chosen = options.only or (["0.6b"] if options.quick else list(PARTS))
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or f"{folder}/gpu.json"
        if options.missing:
            chosen = [part for part in chosen if not measured(path, part + VARIANT)]
        lost = {}
        for part in (CEILINGS, *chosen):
            left = options.within - (time.monotonic() - began)
            without = (part,) if part in chosen else (part, *chosen)
            why = f"not begun: the {options.within:g} s are over"
            if left > 1:
                why = apart(min(options.limit, left), measure, part, path, without)
            if why:
                failed(path, part + VARIANT, why)
                lost[part] = why
            if why and part == CEILINGS:
                break
        record = read(path)
    for missing, why in record.get("absent", {}).items():
        print(f"{missing}: {why}")
    if lost:
        raise SystemExit(f"failed: {', '.join(lost)}")


def measure(part: str, path: str, without: tuple[str, ...]) -> None:
    """One part, in this process; `without`: the parts whose earlier figures no longer count."""
    start = time.perf_counter()
    report = Parts("Models on a CUDA device", path=path, part=part, variant=VARIANT)
    report.resume(without)
    report.absent[part + VARIANT] = CUT_OFF
    report.save(path)
    try:
        if part == CEILINGS:
            report.add(BANDWIDTH, copy_bandwidth() / 1e12, "TB/s")
            report.add(RATE, matrix_rate() / 1e12, "TFLOP/s")
        else:
            PARTS[part](report, Card(report.value(BANDWIDTH) * 1e12, report.value(RATE) * 1e12))
        if report.absent[part + VARIANT] == CUT_OFF:
            del report.absent[part + VARIANT]
    finally:
        report.save(path)
        print(f"\n{part}, {time.perf_counter() - start:.0f} s\n{table(report.new)}", flush=True)


# ---------------------------------------------------------------- steps


def prefilled(runtime: ModelRuntime, batch: int, longest: int = CONTEXT) -> tuple[Driver, list[Stream]]:
    """Sequences with `CONTEXT` tokens each, the first with `longest`; a few steps decoded."""
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(CONTEXT if i else longest)) for i in range(batch)]
    for sequence in sequences:
        driver.prefill([sequence])
    driver.decode_many(sequences, 20)
    return driver, sequences


def decode(
    report: Report, runtime: ModelRuntime, shape: Shape | Counted, card: Card, targets: dict[int, float | None]
) -> None:
    """Wall time of a step with two in flight, as the engine runs it; and the time that the device alone takes."""
    for batch, target in targets.items():
        driver, sequences = prefilled(runtime, batch)
        rounds, begin = [], sequences[0].length
        for _ in range(5):
            start = time.perf_counter()
            driver.decode_many(sequences, 40)
            rounds.append((time.perf_counter() - start) / 40)
        context = (begin + sequences[0].length) // 2
        floor = shape.decode_bytes(batch, context) / card.bandwidth
        alone = device_seconds(runtime, driver, sequences)
        report.add(
            f"{shape.name}: decode step, batch {batch}, context {context}",
            statistics.median(rounds) * 1e3,
            "ms",
            floor=floor * 1e3,
            target=target,
            better="lower",
            samples=rounds,
            note=f"{alone * 1e3:.3f} ms of it on the device{fused_products(runtime, batch)}",
        )


def fused_products(runtime: ModelRuntime, batch: int) -> str:
    return ", fused products" if runtime._executor.fused.get(batch) else ""  # type: ignore[attr-defined]


def device_seconds(runtime: ModelRuntime, driver: Driver, sequences: list[Stream], rounds: int = 10) -> float:
    """Seconds of a step when the host is far ahead: two steps are enqueued while the device is kept busy."""
    raw, ones = runtime._stream.raw, [1] * len(sequences)  # type: ignore[attr-defined]
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(raw):
            torch.cuda._sleep(20_000_000)  # some 10 ms
        start.record(raw)
        steps = [driver.launch("decode", sequences, [[-1]] * len(sequences), ones) for _ in range(2)]
        end.record(raw)
        for step in steps:
            driver.finish_step(*step)
        times.append(start.elapsed_time(end) / 2e3)
    return statistics.median(times)


def decode_untimed(
    report: Report, model: Shape, card: Card, kernels: str, batches: tuple[int, ...], **settings: Any
) -> None:
    """Decode steps on the device alone, with kernels that are not the default."""
    with untimed(kernels), opened(model, graph_batch_sizes=batches, **settings) as runtime:
        for batch in batches:
            driver, sequences = prefilled(runtime, batch)
            took = device_seconds(runtime, driver, sequences)
            floor = model.decode_bytes(batch, sequences[0].length) / card.bandwidth
            name = f"{model.name}: decode step on the device, batch {batch}, untimed {kernels}"
            note = fused_products(runtime, batch).removeprefix(", ")
            report.add(name, took * 1e3, "ms", floor=floor * 1e3, better="lower", note=note)
        decode_kernels(report, runtime, model, batches[-1], name=f"{model.name}, untimed {kernels}")


def prefill(
    report: Report,
    runtime: ModelRuntime,
    shape: Shape | Counted,
    card: Card,
    length: int = 8192,
    target: float | None = 0.55,
) -> None:
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
    report.add(name, rate / 1e12, "TFLOP/s", floor=card.rate / 1e12, target=target, samples=rounds)


def skewed(report: Report, runtime: ModelRuntime, shape: Shape, card: Card, batch: int, longest: int) -> None:
    """A decode step of one long sequence among short ones, on the device alone."""
    driver, sequences = prefilled(runtime, batch, longest)
    took = device_seconds(runtime, driver, sequences)
    context = sum(sequence.length for sequence in sequences) / batch
    floor = shape.decode_bytes(batch, round(context)) / card.bandwidth
    name = f"{shape.name}: decode step on the device, batch {batch}, one of {longest:,} among {CONTEXT}"
    report.add(name, took * 1e3, "ms", floor=floor * 1e3, better="lower")


def decode_kernels(
    report: Report, runtime: ModelRuntime, shape: Shape | Counted, batch: int, steps: int = 10, name: str = ""
) -> None:
    driver, sequences = prefilled(runtime, batch)
    name = f"{name or shape.name}, a decode step, batch {batch}"
    kernels(report, name, lambda: driver.decode_many(sequences, steps), steps)


def prefill_kernels(report: Report, runtime: ModelRuntime, shape: Shape | Counted, length: int) -> None:
    driver = Driver(runtime)
    driver.prefill([driver.sequence(tokens(length))])  # the weights, loaded once
    sequence = driver.sequence(tokens(length))
    kernels(report, f"{shape.name}, a prefill of {length}", lambda: driver.prefill([sequence]), 1)


def kernels(report: Report, name: str, work: Callable[[], object], steps: int) -> None:
    """Where a step's time goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type.name == "CUDA":
            spent[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    rows = [(kernel, us / steps, calls[kernel] / steps) for kernel, us in spent.most_common()]
    report.extra.setdefault("kernels", {})[name] = rows
    print(f"\n{name}: {sum(calls.values()) / steps:.0f} kernels, {sum(spent.values()) / steps:.0f} us")
    for kernel, us, count in rows[:14]:
        print(f"{us:9.1f} us {count:6.1f} x  {kernel[:90]}")


def waits(report: Report, mode: str, batch: int = 64) -> None:
    """The share of an engine's steps in which the device has nothing to do."""
    context = opened(SMALL, pipeline=mode, graph_batch_sizes=(batch,), max_num_seqs=batch, max_model_len=4096)
    with context as runtime:
        alone = device_seconds(runtime, *prefilled(runtime, batch))
        with Engine(context.config, runtime=runtime) as engine:
            step = (generation_seconds(engine, batch, 232) - generation_seconds(engine, batch, 32)) / 200
    name = f"device idle between steps, batch {batch}, pipeline {mode}"
    share = 100 * max(0.0, 1 - alone / step)
    note = f"a step takes {step * 1e3:.3f} ms, {alone * 1e3:.3f} of them on the device"
    report.add(name, share, "%", target=3.0 if mode == "on" else None, better="lower", note=note)


def generation_seconds(engine: Engine, batch: int, n_tokens: int) -> float:
    """Seconds to generate for prompts that the prefix cache has, with hardly any prefill. Their context is that of
    `prefilled`."""
    sampling = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    prompts = [[i, *tokens(CONTEXT - 100)] for i in range(batch)]
    engine.generate([Request(prompt=p, sampling=SamplingParams(max_tokens=1, temperature=0)) for p in prompts])
    start = time.perf_counter()
    engine.generate([Request(prompt=p, sampling=sampling) for p in prompts])
    return time.perf_counter() - start


def sampling(report: Report, card: Card) -> None:
    """Drawing tokens, against one read of the logits: with the launches by an idle host, and on the device alone.
    The logits are rounded like a model's, so many are equal."""
    from petiole.gpu_worker.runtime.cuda.executor import choose
    from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata

    for batch in (1, 64, 256):
        logits = (torch.randn(batch, 151_936, device="cuda") * 3).bfloat16().float()
        keys = torch.randint(-(2**31), 2**31, (batch, 2), device="cuda", dtype=torch.int32)
        full = {
            "top_k": torch.full((batch,), 20, device="cuda"),
            "top_p": torch.full((batch,), 0.95, device="cuda"),
        }
        for name, filters in (("plain", {}), ("top-p", {"top_p": full["top_p"]}), ("top-k and top-p", full)):
            temperature = torch.full((batch,), 0.6, device="cuda")
            choice = SamplingMetadata(temperature, keys, filters.get("top_k"), filters.get("top_p"), None)
            took = seconds(lambda c=choice, x=logits: choose(x, c))  # type: ignore[misc]
            floor = logits.nbytes / card.bandwidth
            report.add(f"sampling, batch {batch}, {name}", took * 1e6, "us", floor=floor * 1e6, better="lower")
            for way in ("off", "rows"):
                with untimed(way):
                    alone = captured_seconds(lambda c=choice, x=logits: choose(x, c))  # type: ignore[misc]
                full_name = f"sampling on the device, batch {batch}, {name}{', short lists' * (way == 'rows')}"
                report.add(full_name, alone * 1e6, "us", floor=floor * 1e6, better="lower")


# ---------------------------------------------------------------- parts


LONG: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 9216}
SHORT: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 4096}


def large(report: Report, card: Card) -> None:
    large_today(report, card)
    release()  # after the function, which holds the runtime
    decode_untimed(report, QWEN3_8B, card, "rows", (32, 64), **LONG)


def large_today(report: Report, card: Card) -> None:
    with opened(QWEN3_8B, graph_batch_sizes=(1, 16, 64), **LONG) as runtime:
        decode(report, runtime, QWEN3_8B, card, {1: 1.2, 16: 1.2, 64: 1.2})
        prefill(report, runtime, QWEN3_8B, card)
        for batch in (1, 64):
            decode_kernels(report, runtime, QWEN3_8B, batch)
        for length in (512, 8192):
            prefill_kernels(report, runtime, QWEN3_8B, length)


def small(report: Report, card: Card) -> None:
    small_today(report, card)
    release()
    decode_untimed(report, SMALL, card, "rows", (32, 64), **SHORT)


def small_today(report: Report, card: Card) -> None:
    with opened(SMALL, graph_batch_sizes=(1, 16, 64), **SHORT) as runtime:
        decode(report, runtime, SMALL, card, {1: None, 16: None, 64: 1.6})
        skewed(report, runtime, SMALL, card, 64, 3584)
        decode_kernels(report, runtime, SMALL, 64)
        prefill_kernels(report, runtime, SMALL, 512)


def idle(report: Report, card: Card) -> None:
    """Pipelined and blocking; an engine closes its runtime, so each has its own."""
    for mode in ("on", "off"):
        waits(report, mode)
        release()


def large_fp8(report: Report, card: Card) -> None:
    """Weights of eight bits, with their own floor."""
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 4096, "weight_quantization": "fp8"}
    shape = dataclasses.replace(QWEN3_8B, name="Qwen3-8B shape, fp8 weights")
    with opened(shape, graph_batch_sizes=(1, 64), **settings) as runtime:
        for batch in (1, 64):
            driver, sequences = prefilled(runtime, batch)
            took = device_seconds(runtime, driver, sequences)
            layers = shape.n_layers * shape.layer_parameters  # a byte each, half of bf16
            floor = (shape.decode_bytes(batch, sequences[0].length) - layers) / card.bandwidth
            name = f"{shape.name}: decode step on the device, batch {batch}"
            report.add(name, took * 1e3, "ms", floor=floor * 1e3, better="lower")


def with_states(report: Report, card: Card) -> None:
    """Three of four layers are delta nets, whose states are read and written in float32. Prefills in exact mode,
    and what it costs: beside those in chunks."""
    raw = config(QWEN35_08B) | WITH_STATES | QWEN35_SIZES
    for way in ways(report):
        states_in(report, card, Described(QWEN35_08B.name, QWEN35_08B.dtype, raw), way)
        release()


def states_in(report: Report, card: Card, model: Described, way: str) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 9216}
    with opened(model, graph_batch_sizes=(1, 16, 64), **settings) as runtime:
        counted = Counted(model.name, model.dtype, model_of(model.raw).plan, runtime.limits.computing.weight_bytes)
        if way == "position by position":
            decode(report, runtime, counted, card, {1: None, 16: None, 64: None})
            decode_kernels(report, runtime, counted, 16)
            prefill_kernels(report, runtime, counted, 512)
        told = dataclasses.replace(counted, name=f"{counted.name}, {way}")
        for length in LENGTHS:
            target = 0.25 if (length, way) == (8192, "by fla-core") else None
            prefill(report, runtime, told, card, length, target)
        prefill_kernels(report, runtime, told, 8192)


def in_four_bits(report: Report, card: Card) -> None:
    """Every product but the embedding, beside the bytes of four bits."""
    raw = config(QWEN3_8B)
    model = Described("Qwen3-8B shape, four bits", QWEN3_8B.dtype, raw)
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 9216}
    with opened(model, source=FourBitWeights(), graph_batch_sizes=(1, 16, 64), **settings) as runtime:
        weights = runtime.limits.computing.weight_bytes
        counted = Counted(model.name, model.dtype, model_of(raw).plan, weights, 4.5)
        decode(report, runtime, counted, card, {1: None, 16: None, 64: None})
        prefill(report, runtime, counted, card, target=None)
        decode_kernels(report, runtime, counted, 1)
        decode_kernels(report, runtime, counted, 64)


def mixtures(report: Report, card: Card) -> None:
    """The layers of a mixture of experts, of which each position takes 8 of 128; plain and in four bits."""
    mixture(report, card, "bf16", RandomWeights(), 16.0)
    release()  # after the function, which holds the runtime
    mixture(report, card, "four bits", FourBitWeights(), 4.5)


def mixture(report: Report, card: Card, name: str, source: RandomWeights, bits: float) -> None:
    model = dataclasses.replace(QWEN3_30B, name=f"a quarter of the layers of Qwen3-30B-A3B, {name}")
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 2048}
    with opened(model, source=source, graph_batch_sizes=(1, 16, 64), **settings) as runtime:
        weights = runtime.limits.computing.weight_bytes
        counted = Counted(model.name, model.dtype, model_of(model.raw).plan, weights, bits, bits)
        decode(report, runtime, counted, card, {1: None, 16: None, 64: None})
        prefill(report, runtime, counted, card, 2000, target=None)
        decode_kernels(report, runtime, counted, 16)
        prefill_kernels(report, runtime, counted, 512)


PARTS: dict[str, Callable[[Report, Card], None]] = {
    "8b": large,
    "0.6b": small,
    "workload": workload,
    "workload-fp8": workload_fp8,
    "questions": questions,
    "images": lambda report, card: images(report, card, profile=kernels),
    "transformers": beside_transformers,
    "mixed": beside_mixed,
    "idle": idle,
    "attention": attending,
    "layers": layering,
    "codes": coding,
    "sampling": sampling,
    "8b-fp8": large_fp8,
    "states": with_states,
    "rules": ruling,
    "four-bits": in_four_bits,
    "mixtures": mixtures,
    "vllm": beside_vllm,
}
