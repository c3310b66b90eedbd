"""A GGUF file on the CPU beside llama.cpp: loading, memory, decode steps.

    python -m bench.models.files --file MODEL.gguf

Without a file it is a small random one. Each side loads the file from the system's cache, weights and vocabulary.
Imports are not counted: each has loaded a model in the same process before. llama.cpp does not map the file.
Memory is at hand for both: a system that is a guest waits for its host to give some, longer than loading takes,
and the side that loads right after the other has freed its own would not wait. The peak is that of one process
while it loads, beside what it holds afterwards. In every round both sides decode the same number of tokens after
the same prompts, on the same number of threads. llama.cpp rounds its inputs to eight bits; so do the rows that say
it."""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench.harness import load
from bench.harness.checkpoints.decoders import SMALL, config
from bench.harness.report import NotAvailableError, Report, arguments
from bench.models.decoding import Goal, Ours, Prompts, Side, Work, in_turns, judge, prompts, works
from bench.peers.llama_cpp import LlamaCpp
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine.loading import load_beside
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.checkpoint.gguf.config import config_of
from petiole.gpu_worker.models.weights.host_memory import new_tensor
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.text import Tokenizer, load_tokenizer

GOALS = (Goal(1, 1.2, "1.2"), Goal(4, 1.3, "1.3"), Goal(16, 1.3, "1.3"))
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", inputs in eight bits": {"activation_quantization": "int8"},
}
"""By what is said of them."""
PROMPT, TOKENS = 128, 12
RANDOM_FILE = "random.gguf"
MOST_LOADING, MOST_PEAK = 1.5, 1.3


@dataclass(frozen=True)
class Loading:
    """seconds; bytes that the process took at most, and afterwards."""

    seconds: float
    peak: int
    after: int


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--file", type=Path, help="a GGUF file of a decoder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report("A GGUF file on the CPU (peer: llama.cpp)")
    rounds = 1 if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="petiole-file-") as scratch:
        measure(options.file or _random(Path(scratch)), report, rounds, options.threads, options.json)
    report.finish(options.json)


def measure(path: Path, report: Report, rounds: int, threads: int, json_path: str | None) -> None:
    with ExitStack() as closing:
        try:
            llama = LlamaCpp(path, config_of(path)["vocab_size"], threads)
            closing.callback(llama.close)
        except NotAvailableError as error:
            llama, report.absent[LlamaCpp.name] = None, str(error)
        name = path.stem
        loads(path, name, llama, report, rounds, threads)
        report.save(json_path)
        for note, settings in SETTINGS.items():
            runtime = ModelRuntime(
                EngineConfig(
                    model=str(path),
                    device="cpu",
                    max_num_seqs=max(goal.size for goal in GOALS),
                    max_model_len=1024,
                    num_threads=threads,
                    **settings,
                )
            )
            sides: list[Side] = [Ours(runtime), *([] if llama is None else [llama])]
            try:
                load.settle()
                for goal in GOALS:
                    work = works(sides, partial(_decodes, prompts(goal.size, PROMPT)), report)
                    rates = in_turns(work, goal.size * TOKENS, rounds, report)
                    judge(report, f"{name}, batch {goal.size}{note}", goal, rates)
                    report.save(json_path)
            finally:
                runtime.close()


def loads(path: Path, name: str, llama: LlamaCpp | None, report: Report, rounds: int, threads: int) -> None:
    ours, theirs = list[Loading](), list[float]()
    for _ in range(rounds):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            fresh.submit(loaded, "petiole-tiny", threads).result()
            _at_hand(path)
            ours.append(fresh.submit(loaded, str(path), threads).result())
        if llama is not None:
            _at_hand(path)
            theirs.append(llama.load())
    ratios = [a.seconds / b for a, b in zip(ours, theirs, strict=False)]
    report.add(
        f"{name}: loading",
        statistics.median(one.seconds for one in ours),
        "s",
        peer=statistics.median(theirs) if theirs else None,
        spread=(min(ratios), max(ratios)) if ratios else None,
        target=MOST_LOADING if theirs else None,
        better="lower",
    )
    peak = statistics.median(one.peak for one in ours)
    after = statistics.median(one.after for one in ours)
    size = path.stat().st_size / 1e6
    report.add(
        f"{name}: memory at the peak of loading, beside afterwards",
        peak / 1e6,
        "MB",
        floor=after / 1e6,
        target=MOST_PEAK,
        better="lower",
        note=f"the file has {size:,.0f} MB",
    )


def loaded(path: str, threads: int) -> Loading:
    """As an engine loads it."""
    torch.set_num_threads(threads)
    before = _held("VmRSS")
    began = time.perf_counter()
    config = EngineConfig(model=path, device="cpu", max_num_seqs=1, max_model_len=512, num_threads=threads)
    runtime, _ = load_beside(config, NO_TRACE, _tokenizer)
    seconds = time.perf_counter() - began
    found = Loading(seconds, _held("VmHWM") - before, _held("VmRSS") - before)
    runtime.close()
    return found


def _at_hand(path: Path) -> None:
    """Memory in which a file's weights fit, written once and free again, in large pages: for these the system does
    not take what were small ones."""
    new_tensor((2 * path.stat().st_size,), torch.uint8, torch.device("cpu")).fill_(1)


def _tokenizer(config: EngineConfig) -> Tokenizer:
    """A random file has no vocabulary: another one stands for it."""
    own = Path(config.model).name != RANDOM_FILE
    return load_tokenizer(resolve_model(config.model if own else "petiole-tiny"))


def _decodes(asked: Prompts, side: Side) -> Work:
    return side.decode(asked, TOKENS)


def _held(field: str) -> int:
    """Bytes of this process, by Linux's name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _random(folder: Path) -> Path:
    from bench.peers import gguf_file

    gguf_file.write(config(SMALL), SMALL.dtype, True, folder / RANDOM_FILE)
    return folder / RANDOM_FILE


if __name__ == "__main__":
    main()
