"""Models whose layers do not keep everything, beside a dense one of the same sizes: their speed, their floors, and
what prompts find again. Random weights; a workload of `bench.engine`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import floors, load
from bench.harness.checkpoints.decoders import SMALL, Shape, config, write_tokenizer
from bench.harness.checkpoints.random_weights import RandomWeights
from bench.harness.report import progress
from bench.harness.runs import Bench
from petiole.gpu_worker import Engine, EngineConfig, Request
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.plan import ModelPlan, Router
from petiole.gpu_worker.runtime.memory.states import state_bytes
from petiole.gpu_worker.runtime.runtime import ModelRuntime

WINDOW = 128
PROMPT, OUTPUT = 64, 32
QWEN35_SLICE = Shape("a sixth of Qwen3.5-0.8B, bf16", "bfloat16", 32_768, 1024, 3584, 4, 8, 2, 256)
"""Four of its 24 layers, and an eighth of its vocabulary."""

_DENSE: dict[str, Any] = {}
_WINDOWED = {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
WITH_STATES = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "full_attention_interval": 3,
}
_OF_SMALL = {f"linear_{name}": size for name, size in (("num_key_heads", 4), ("num_value_heads", 4))} | {
    f"linear_{name}": SMALL.head_dim for name in ("key_head_dim", "value_head_dim")
}
QWEN35_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "full_attention_interval": 4,
}
KINDS = {
    "dense": _DENSE,
    f"windows of {WINDOW} in 5 of 6 layers": _WINDOWED,
    "states in 4 of 6 layers": WITH_STATES | _OF_SMALL,
}


@dataclass(frozen=True)
class Counted:
    """What steps of a plan read and compute: see `floors.Needs`. bits: of a weight, but of an
    embedding beside the head; expert_bits: of one of an expert."""

    name: str
    dtype: str
    plan: ModelPlan
    weight_bytes: int
    bits: float = 16
    expert_bits: float = 16

    @property
    def _size(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.dtype]

    def decode_bytes(self, batch: int, context: int) -> int:
        """Weights, the keys and values that are seen, and states, which are read and written. Of experts, those
        that at least one sequence takes, if all are taken equally often. Not an embedding beside the head."""
        seen = sum(mixer.kept_size * min(context, mixer.window or context) for _, mixer in self.plan.attending)
        own = seen * self._size + 2 * state_bytes(self.plan, self._size)
        unread = sum(
            router.experts * size * (1 - router.chosen / router.experts) ** batch
            for router, size in self._mixtures
        )
        return self._read_bytes - round(unread * self.expert_bits / 8) + batch * own

    @property
    def _read_bytes(self) -> int:
        embedding = 0 if self.plan.tied_head else self.plan.vocab_size * self.plan.hidden_size * self._size
        return self.weight_bytes - embedding

    @property
    def _mixtures(self) -> list[tuple[Router, int]]:
        """Their routers, and the weights of one expert."""
        found = (layer.experts for layer in self.plan.layers)
        hidden = self.plan.hidden_size
        return [
            (one.router, hidden * (sum(one.each.up_sizes) + one.each.inner)) for one in found if one is not None
        ]

    def operations(self, tokens: int, context: float, outputs: int) -> float:
        plan, head = self.plan, self.plan.vocab_size * self.plan.hidden_size
        experts = sum(router.experts * size for router, size in self._mixtures)
        always = (self._read_bytes - experts * self.expert_bits / 8) / (self.bits / 8) - head
        taken = sum(router.chosen * size for router, size in self._mixtures)
        seen = sum(4 * mixer.q_size * min(context, mixer.window or context) for _, mixer in plan.attending)
        states = 6 * state_bytes(plan, 0) // 4  # three multiply-adds for each number of a matrix
        return (2 * (always + taken) + seen + states) * tokens + 2 * head * outputs


@contextmanager
def opened(bench: Bench, shape: Shape, kind: dict[str, Any], **options: Any) -> Iterator[tuple[Engine, Counted]]:
    """An engine of random weights of a kind, with the sizes of a shape."""
    raw = config(shape) | kind
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        write_tokenizer(shape.vocab_size, Path(folder))
        settings = EngineConfig(
            model=folder, device="cpu", dtype=shape.dtype, num_threads=bench.threads, **options  # type: ignore[arg-type]
        )  # fmt: skip
        with Engine(settings, runtime=ModelRuntime(settings, source=RandomWeights())) as engine:
            load.at_concurrency(engine, load.requests(2, 8, 4), 2)
            weights = int(engine.stats()["weight_bytes"])
            bits = {"float32": 32, "bfloat16": 16}[shape.dtype]
            counted = Counted(shape.name, shape.dtype, model_of(raw).plan, weights, bits, bits)
            yield engine, counted


def beside_dense(bench: Bench) -> None:
    """Throughput against the floor, and the hit rates of a shared prompt and of conversations."""
    rows = bench.pick(4, 8)
    for kind, settings in progress(list(KINDS.items()), "groups"):
        with opened(bench, SMALL, settings, max_num_seqs=rows) as (engine, counted):
            machine = floors.Machine(floors.read_bandwidth(counted.weight_bytes), floors.matrix_rate(SMALL.dtype))
            runs = [
                load.at_concurrency(engine, load.requests(rows, PROMPT, OUTPUT, seed=i), rows)
                for i in range(bench.pick(1, 5))
            ]
            rates = [run.tokens_per_s for run in runs]
            best = rows * OUTPUT / machine.batch_s(counted, rows, PROMPT, OUTPUT, rows)
            name = f"{SMALL.name}, {kind}"
            sizes = f"{PROMPT} in, {OUTPUT} out, {rows} at once"
            bench.report.add(f"{name}, {sizes}", max(rates), "tokens/s", floor=best, samples=rates)
            bench.report.add(f"{name}: hit rate, one prompt before {rows} questions", shared(bench, engine), "")
            bench.report.add(f"{name}: hit rate of a conversation's last turn", talk(bench, engine), "")
    compiled(bench)


def shared(bench: Bench, engine: Engine) -> float:
    """Found again, of the prompts of questions after one common beginning: from the third one on, all of it."""
    common = load.prompts(1, bench.pick(64, 512), seed=900)[0]
    asked = [common + tail for tail in load.prompts(bench.pick(4, 8), 16, seed=901)]
    return hit_rate(engine, asked)


def talk(bench: Bench, engine: Engine) -> float:
    history = load.prompts(1, bench.pick(32, 256), seed=902)[0]
    rate = 0.0
    for turn in range(bench.pick(2, 4)):
        history = history + load.prompts(1, 48, seed=903 + turn)[0]
        result = engine.generate([Request(prompt=history, sampling=load.greedy(16))])[0]
        rate = result.usage.cached_prompt_tokens / result.usage.prompt_tokens
        history = history + list(result.token_ids)
    return rate


def hit_rate(engine: Engine, prompts: Sequence[Sequence[int]]) -> float:
    """One after the other."""
    usage = [
        engine.generate([Request(prompt=list(prompt), sampling=load.greedy(4))])[0].usage for prompt in prompts
    ]
    return sum(one.cached_prompt_tokens for one in usage) / sum(one.prompt_tokens for one in usage)


def compiled(bench: Bench) -> None:
    """Delta nets in compiled code beside torch: decodes at some numbers of rows, and a prompt."""
    shape, kind = (SMALL, WITH_STATES | _OF_SMALL) if bench.quick else (QWEN35_SLICE, WITH_STATES | QWEN35_SIZES)
    with ExitStack() as stack:
        sides = {}
        for native in ("on", "off"):
            os.environ["PETIOLE_NATIVE"] = native
            stack.callback(os.environ.pop, "PETIOLE_NATIVE", None)
            sides[native], counted = stack.enter_context(
                opened(bench, shape, kind, max_num_seqs=16, prefix_cache="off")
            )
        machine = floors.Machine(floors.read_bandwidth(counted.weight_bytes), floors.matrix_rate(shape.dtype))
        for rows, prompt, output in bench.pick(
            ((2, 16, 8),), ((1, 16, 32), (8, 16, 32), (16, 16, 32), (1, 512, 2))
        ):

            def rate(native: str, n: int = rows, prompt: int = prompt, output: int = output) -> float:
                return load.at_concurrency(sides[native], load.requests(n, prompt, output), n).tokens_per_s

            bench.report.compare(
                f"{shape.name}, {prompt} in, {output} out, {rows} at once: compiled against torch",
                "tokens/s",
                partial(rate, "on"),
                partial(rate, "off"),
                rounds=bench.pick(1, 3),
                floor=rows * output / machine.batch_s(counted, rows, prompt, output, rows),
            )
