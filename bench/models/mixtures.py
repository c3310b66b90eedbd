"""Decode steps of mixtures of experts and of models with states, beside others and the bytes that a step reads.

Real shapes, of which some have fewer layers, with random weights of the published formats: four bits a weight
of the experts of gpt-oss (MXFP4), of all layers of Qwen3-30B-A3B; bfloat16 for Qwen3.5-0.8B. The sides take
turns where the memory has room for both, and the floor is measured beside each turn. Routers of random weights
take all experts about equally often."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine.groups import QWEN35_SIZES, WITH_STATES, Counted
from bench.harness import floors, load
from bench.harness.checkpoints.decoders import Described, Shape, config, write_tokenizer
from bench.harness.checkpoints.random_weights import FourBitWeights, RandomWeights, mxfp4_form
from bench.harness.report import NotAvailableError, Report, arguments
from bench.models.decoding import FLOOR, Goal, Ours, Work, against_floor, in_turns, judge, prompts, works
from bench.peers.children.outside import NAMES, Outside
from bench.peers.llama_cpp import LlamaCpp, open_peer
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.runtime.memory.container import host_memory_left
from petiole.gpu_worker.runtime.runtime import ModelRuntime

PROMPT, TOKENS = 32, 8
SIZES = (1, 8, 16)
PEER_ROOM = 2.5
"""Times the weights: the peer's file, which the system keeps in its cache, and the copy that it computes with."""


@dataclass(frozen=True)
class Case:
    """bits: of a weight, and of one of an expert. of_floor: how many times its floor a step may take. outside:
    peers in processes of their own."""

    model: Described
    source: Callable[[], RandomWeights]
    four_bits: bool
    bits: tuple[float, float]
    ahead: float
    of_floor: float
    outside: tuple[str, ...] = ()


def _mixture(
    name: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], **more: Any
) -> Described:
    n, kv, width = heads
    shape = Shape(name, "bfloat16", 151_936, hidden, inner, layers, n, kv, width, max_positions=2048)
    return Described(name, "bfloat16", config(shape) | {"tie_word_embeddings": False} | more)


QWEN3_30B = _mixture(
    "a quarter of the layers of Qwen3-30B-A3B, four bits",
    12,
    2048,
    6144,
    (32, 4, 128),
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
)
GPT_OSS = _mixture(
    "gpt-oss-20b, MXFP4",
    24,
    2880,
    2880,
    (64, 8, 64),
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    vocab_size=201_088,
    num_local_experts=32,
    num_experts_per_tok=4,
    sliding_window=128,
)
_QWEN35 = Shape("Qwen3.5-0.8B shape, bf16", "bfloat16", 248_320, 1024, 3584, 24, 8, 2, 256)
QWEN35 = Described(_QWEN35.name, _QWEN35.dtype, config(_QWEN35) | WITH_STATES | QWEN35_SIZES)

CASES = {
    "qwen3-30b": Case(QWEN3_30B, FourBitWeights, True, (4.5, 4.5), ahead=1.2, of_floor=1.43),
    "gpt-oss": Case(
        GPT_OSS, partial(FourBitWeights, mxfp4_form, "experts."), True, (16, 4.25), ahead=1.2, of_floor=1.43
    ),
    "qwen3.5": Case(QWEN35, RandomWeights, False, (16, 16), ahead=1.0, of_floor=1.3, outside=("openvino",)),
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(CASES), action="append", help="may be given several times")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report(
        "Mixtures and models with states on the CPU (output tokens a second; peer: the best of the others)"
    )
    for name in options.only or CASES:
        case = CASES[name]
        measure(_less(case) if options.quick else case, report, 1 if options.quick else options.rounds, options)
        report.save(options.json)
    report.finish(options.json)


_SMALL = {"num_hidden_layers": 4, "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 256} | {
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def _less(case: Case) -> Case:
    """To see that it runs."""
    raw = case.model.raw
    fewer = {key: size for key, size in _SMALL.items() if key in raw}
    return replace(case, model=replace(case.model, name=f"small: {case.model.name}", raw=raw | fewer))


def measure(case: Case, report: Report, rounds: int, options: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case.model.raw))
        write_tokenizer(case.model.raw["vocab_size"], Path(folder))
        rates, with_peers = _ours(case, folder, report, rounds, options)
        load.let_go()
        if not with_peers:
            with ExitStack() as stack:
                peers = _peers(case, folder, report, options, stack)
                for size, found in rates.items():
                    found |= _decoded(peers, size, rounds, report)
    for size, found in rates.items():
        name = f"{case.model.name}, batch {size}"
        judge(report, name, Goal(size, case.ahead, f"{case.ahead:g}"), found)
        against_floor(report, name, size, found, case.of_floor)


def _ours(
    case: Case, folder: str, report: Report, rounds: int, options: Any
) -> tuple[dict[int, dict[str, list[float]]], bool]:
    """The rates of each size, and whether the memory had room for the peers, which then took turns. Otherwise they
    come when this model has gone."""
    model = case.model
    settings = EngineConfig(
        model=folder,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=max(SIZES),
        max_model_len=1024,
        num_threads=options.threads,
    )
    with ExitStack() as stack:
        runtime = stack.enter_context(closing(ModelRuntime(settings, source=case.source())))
        plan = model_of(model.raw).plan
        counted = Counted(model.name, model.dtype, plan, runtime.limits.computing.weight_bytes, *case.bits)
        report.add(f"{model.name}: weights", counted.weight_bytes / 1e6, "MB")
        has_room = host_memory_left() > PEER_ROOM * counted.weight_bytes
        sides = [Ours(runtime), *(_peers(case, folder, report, options, stack) if has_room else [])]
        rates = {
            size: _decoded(sides, size, rounds, report, partial(_floor, counted, size, case)) for size in SIZES
        }
        return rates, has_room


def _peers(case: Case, folder: str, report: Report, options: Any, stack: ExitStack) -> list[LlamaCpp | Outside]:
    """The peers that this machine has."""
    peers: list[LlamaCpp | Outside] = []
    raw, dtype = case.model.raw, case.model.dtype
    if (llama := open_peer(raw, dtype, options.threads, report, four_bits=case.four_bits)) is not None:
        peers.append(stack.enter_context(closing(llama)))
    for kind in case.outside:
        try:
            length = PROMPT + TOKENS + 1
            most = (max(SIZES), length, max(SIZES) * length)
            peers.append(stack.enter_context(closing(Outside(kind, folder, threads=options.threads, most=most))))
        except NotAvailableError as error:
            report.absent[NAMES[kind]] = str(error)
    return peers


def _decoded(
    sides: Sequence[Any], size: int, rounds: int, report: Report, least: Work | None = None
) -> dict[str, list[float]]:
    load.settle()
    work: dict[str, Work] = {} if least is None else {FLOOR: least}
    work |= works(sides, lambda side: side.decode(prompts(size, PROMPT), TOKENS), report)
    return in_turns(work, size * TOKENS, rounds, report)


def _floor(counted: Counted, size: int, case: Case) -> float:
    """Seconds of the steps, at the rates of this moment. Where all weights have four bits, inputs in float32 meet
    them."""
    rate = floors.matrix_rate(counted.dtype if case.bits[0] == 16 else "float32")
    machine = floors.Machine(floors.read_bandwidth(counted.weight_bytes), rate)
    return TOKENS * machine.decode_step_s(counted, size, PROMPT + TOKENS // 2)


if __name__ == "__main__":
    main()
