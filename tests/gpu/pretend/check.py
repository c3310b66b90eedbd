"""Engines on a pretended card, from start to shutdown. Fails if the card refused a call, if anything was raised or
logged as a warning, or if a further engine left memory behind. Tokens mean nothing, since nothing is computed.

What `python -m tests.gpu.pretend` runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu.card import release
from bench.gpu.host import counts
from bench.harness.checkpoints import moondream
from bench.harness.checkpoints.decoders import Shape, config as shape_config, write, write_adapter
from bench.harness.driver import Driver
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.request import Constraint, FinishReason, Request, SamplingParams
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.runtime.cuda import graphs
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.text import load_tokenizer
from tests.support.moondream import NARROW as NARROW_MOONDREAM
from tests.support.pictures import file

WIDE = Shape("heads of 128", "bfloat16", 2048, 512, 1024, 2, 4, 2, 128, max_positions=65_536)
NARROW = Shape("heads of 64", "bfloat16", 2048, 256, 768, 2, 4, 2, 64, max_positions=131_072)
"""With more positions than the card has room for, so that the pool fills it."""
SEEING = NARROW_MOONDREAM | {"text": NARROW_MOONDREAM["text"] | {"vocab_size": 51_200}}
"""With the ids that skills are asked by."""

SIZES = (1, 4, 16, 20)
N_TOKENS, DRAFTS = 24, 4
USUAL, FUSED = math.inf, -math.inf
"""Margins that decide which of the two graphs of a size is kept: here, neither takes any time."""


@dataclass(frozen=True)
class Case:
    """`model`: changes of its `config.json`. `constraint`: of every second request. `pictures`: the model is a
    small Moondream, asked about some. `tier`: KV goes to files, from which a second engine has it."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    shape: Shape = WIDE
    margin: float = USUAL
    adapters: tuple[str | None, ...] = (None,)
    model: dict[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    pictures: bool = False
    tier: bool = False


CASES = (
    Case("graphs, usual products"),
    Case("graphs, fused products", margin=FUSED),
    Case("graphs, heads of 64", {"pipeline": "off"}, NARROW, FUSED),
    Case("pages of 16", {"page_size": 16, "prefix_cache": "block"}, margin=FUSED),
    Case("without graphs", {"cuda_graphs": "off"}),
    Case("weights in eight bits", {"weight_quantization": "fp8"}),
    Case("drafts", {"speculative_tokens": DRAFTS}),
    Case(
        "drafts, pages of 16",
        {"speculative_tokens": DRAFTS, "page_size": 16, "prefix_cache": "block"},
        margin=FUSED,
    ),
    Case("adapters", {"lora_slots": 2, "lora_max_rank": 16}, margin=FUSED, adapters=(None, "a", "b", "c")),
    Case("chunks beside decodes", {"prefill_policy": "mixed", "chunk_size": 64}),
    Case(
        "constraints", model={"eos_token_id": 2047}, constraint=Constraint("regex", "!{0,500}")
    ),  # tokens are 0, which is "!"
    Case("KV in files", tier=True),
    Case("KV in files, pages of 16", {"page_size": 16, "prefix_cache": "block"}, tier=True),
    Case("images", pictures=True),
    Case("images, pages of 16", {"page_size": 16, "prefix_cache": "block"}, pictures=True),
    Case("images, without graphs", {"cuda_graphs": "off", "pipeline": "off"}, pictures=True),
)
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
MORE_CASES = (
    Case("sliding windows in one of two layers", model=WINDOW),
    Case("keys and values in eight bits", {"kv_dtype": "fp8"}),
)
"""Those whose kernels no wheelhouse has: FlashInfer compiles them, for minutes, the first time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--more", action="store_true", help="compile FlashInfer's kernels for the cases without")
    cases = (*CASES, *MORE_CASES) if parser.parse_args().more else CASES
    if torch.version.cuda is None:
        raise SystemExit(f"torch {torch.__version__} was built without CUDA")
    warnings = Warnings(logging.WARNING)
    logging.getLogger("petiole.gpu_worker").addHandler(warnings)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    kept = set[int]()  # what the libraries keep, after each engine
    before = counts()
    assert before is not None, "python -m tests.gpu.pretend runs this on a pretended card"
    for case in cases:
        n_pages = serve(case)
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream
        release()
        kept.add(torch.cuda.memory_allocated())
        after = counts()
        assert after is not None
        launched, captured, replayed = (
            getattr(after, name) - getattr(before, name) for name in ("launched", "captured", "replayed")
        )
        before = after
        print(f"{case.name}: {n_pages:,} pages; {launched:,} launches, ", end="")
        print(f"{replayed:,} replays of graphs, {captured:,} launches captured", flush=True)
    peak, memory = (size / 2**30 for size in (before.peak, before.memory))
    print(f"{before.refused} calls refused, {len(warnings.found)} warnings, {max(kept)} bytes kept, ", end="")
    print(f"at most {peak:.2f} of {memory:.2f} GiB")
    if before.refused or warnings.found or len(kept) > 1:
        raise SystemExit(1)


class Warnings(logging.Handler):
    """Keeps and prints what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))
        print(f"warning: {self.found[-1]}", flush=True)


def serve(case: Case) -> int:
    """An engine from its start to its shutdown. Returns the pages of its pool."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        if case.pictures:
            moondream.write(SEEING, model)
        else:
            write(case.shape, model)
            (model / "config.json").write_text(json.dumps(shape_config(case.shape) | case.model))
        for seed, name in enumerate(filter(None, case.adapters)):
            write_adapter(case.shape, Path(folder, name), seed=seed)
        graphs.MARGIN = case.margin
        config = EngineConfig(
            model=str(model),
            kv_tier=f"{folder}/kv" if case.tier else "",
            **{"device": "cuda", "max_num_seqs": 24, "graph_batch_sizes": SIZES, **case.settings},
        )
        runtime = ModelRuntime(config)
        if config.speculative_tokens:
            verify(runtime)
            runtime.close()
            return runtime.limits.n_pages
        tokenizer = load_tokenizer(model) if case.constraint or case.pictures else None
        if case.tier:
            with Engine(config, runtime=runtime) as engine:
                engine.generate(list(requests(case, folder, 14)))
                assert int(engine.stats()["kv_tier_saved_chunks"]) > 0
            runtime = ModelRuntime(config)
        with Engine(config, runtime=runtime, tokenizer=tokenizer) as engine:
            if case.pictures:
                for n in (1, 3, 14, 24):
                    engine.generate(list(questions(n)))
                return engine.limits.n_pages
            for n in (1, 3, 14, 24):
                for result in engine.generate(list(requests(case, folder, n))):
                    assert result.finish_reason == FinishReason.LENGTH, result
                    assert result.usage.completion_tokens == N_TOKENS, result
            assert not case.tier or int(engine.stats()["kv_tier_restored_tokens"]) > 0
            return engine.limits.n_pages


def verify(runtime: ModelRuntime) -> None:
    """Steps with drafts, launched by hand: an engine's would never end, since none of them is accepted."""
    for n in (1, 3, 20):
        driver = Driver(runtime)
        sequences = [driver.sequence(range(10, 20 + i)) for i in range(n)]
        driver.prefill(sequences)
        for step in range(N_TOKENS):
            driver.verify(sequences, [[1] * ((step + i) % (DRAFTS + 1)) for i in range(n)])


def requests(case: Case, folder: str, n: int) -> Iterator[Request]:
    """Prompts from one token to more than a chunk, some alike; and all ways to draw."""
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "logprobs": 2},
    )
    for i in range(n):
        adapter = case.adapters[i % len(case.adapters)]
        yield Request(
            prompt=list(range(10, 11 + 30 * i)),
            sampling=SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, **ways[i % len(ways)]),
            adapter=adapter and f"{folder}/{adapter}",
            constraint=case.constraint if i % 2 else None,
        )


def questions(n: int) -> Iterator[Request]:
    """All skills, about pictures of two to thirteen crops, some of them alike. Every token is 0, which ends points
    and boxes at once, and which reasoning bans."""
    skills: tuple[tuple[str, dict[str, Any]], ...] = (
        ("query", {"question": "How many?"}),
        ("point", {"object": "thing"}),
        ("caption", {"length": "short"}),
        ("detect", {"object": "thing"}),
    )
    for i in range(n):
        name, options = skills[i % len(skills)]
        text = name in ("query", "caption")
        sampling = SamplingParams(max_tokens=N_TOKENS, ignore_eos=text, temperature=0.5 * (i % 2))
        picture = file(i % 7, size=(200 + 130 * (i % 7), 400))
        yield Request(skill=SkillCall(name, options), images=(picture,), sampling=sampling)


if __name__ == "__main__":
    main()
