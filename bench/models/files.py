"""Decode steps of GGUF files that people have, beside llama.cpp on the same file. `make real` fetches some.

python -m bench.models.files ~/.cache/petiole-real/q15/model.gguf [--threads 2] [--json PATH]
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from bench.harness import load
from bench.harness.report import NotAvailableError, Report, arguments
from bench.models.decoding import Ours, Prompts, Side, Work, in_turns, prompts, works
from bench.peers.llama_cpp import LlamaCpp
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.runtime import ModelRuntime

PROMPT, TOKENS = 64, 16
GOALS = {1: 1.2, 4: 1.3, 16: 1.3}
"""By rows, how many times as fast as llama.cpp a decode must be."""


def measure_file(path: Path, report: Report, rounds: int, threads: int) -> None:
    settings = EngineConfig(
        model=str(path), device="cpu", max_num_seqs=max(GOALS), max_model_len=1024, num_threads=threads
    )
    with ExitStack() as stack:
        runtime = stack.enter_context(closing(ModelRuntime(settings)))
        report.add(f"{path.parent.name}: weights", runtime.limits.computing.weight_bytes / 1e6, "MB")
        sides: list[Side] = [Ours(runtime)]
        try:
            sides.append(stack.enter_context(closing(LlamaCpp(path, runtime.limits.vocab_size, threads))))
        except NotAvailableError as error:
            report.absent[LlamaCpp.name] = str(error)
        load.settle()
        for size, goal in GOALS.items():
            asked = prompts(size, PROMPT)
            rates = in_turns(works(sides, partial(_decodes, asked), report), size * TOKENS, rounds, report)
            ours, peers = rates.pop(Ours.name), list(rates.values())
            ratios = [a / b for a, b in zip(ours, peers[0], strict=True)] if peers else []
            report.add(
                f"{path.parent.name}, batch {size}",
                statistics.median(ours),
                "tokens/s",
                peer=statistics.median(peers[0]) if peers else None,
                spread=(min(ratios), max(ratios)) if peers else None,
                target=goal if peers else None,
            )


def _decodes(asked: Prompts, side: Side) -> Work:
    return side.decode(asked, TOKENS)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report("Published GGUF files on the CPU (output tokens a second; peer: llama.cpp)")
    for path in options.files:
        measure_file(path, report, 1 if options.quick else options.rounds, options.threads)
        report.save(options.json)
    report.finish(options.json)


if __name__ == "__main__":
    main()
