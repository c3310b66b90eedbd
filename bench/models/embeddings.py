"""Vectors and scores of texts on the CPU, in turns with others.

Vectors: encoders of the shapes of MiniLM-L6, BGE-M3, all-mpnet-base and nomic-embed, in float32, and some of them
in bfloat16 where the processor multiplies it; then OpenVINO computes in bfloat16, too, and the others in float32.
The peers are sentence-transformers, OpenVINO and ONNX Runtime, each where it is installed
(`bench/peers/children/texts.py`) and with the quickest of its settings. Their texts are tokenized before. Ours are
a request of the engine, with its tokenizer. The peer of a row is the best of the others. A second row has the
products of that rate beside the quickest product of these shapes, measured in the same run. Scores: pairs that
share their query, with the prefix cache and without.

    python -m bench.models.embeddings [--quick] [--only minilm|m3|mpnet|...|scores] [--json PATH]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from ctypes import byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from bench.harness import load
from bench.harness.checkpoints.decoders import SMALL, checkpoint
from bench.harness.checkpoints.encoders import BGE_M3, MINILM, MPNET, NOMIC, Encoder, words, write_tokenizer
from bench.harness.report import NotAvailableError, best_of, progress
from bench.harness.runs import OURS, Bench, arguments, in_turns, opened
from bench.peers.children.texts import PEERS, TextPeer
from petiole.contract.results.vectors import Vectors
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request, Scoring
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights
from petiole.gpu_worker.runtime.cpu.native.stack import library_for

TARGET_REUSE, TARGET_PRODUCTS = 1.5, 0.85
ALIKE = {"float32": 1e-4, "bfloat16": 2e-2}
"""How far a number of a peer's vectors of length 1 may be from ours."""


@dataclass(frozen=True)
class Case:
    """cases: tokens of a text, and the number of texts. target: of the ratio to the best of the others."""

    encoder: Encoder
    cases: Sequence[tuple[int, int]]
    rounds: int
    target: float
    by_products: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def name(self) -> str:
        return self.encoder.name if self.dtype == "float32" else self.encoder.name.replace("fp32", "bf16")


CASES = {
    "minilm": Case(MINILM, ((128, 64), (512, 16)), 5, target=1.1),
    "m3": Case(BGE_M3, ((128, 8), (512, 2)), 3, target=1.0, by_products=True),
    "mpnet": Case(MPNET, ((128, 16), (512, 4)), 3, target=1.0),
    "nomic": Case(NOMIC, ((128, 16), (512, 4)), 3, target=1.0),
    "minilm-bf16": Case(MINILM, ((128, 64), (512, 16)), 5, target=1.1, dtype="bfloat16"),
    "m3-bf16": Case(BGE_M3, ((128, 8), (512, 2)), 3, target=1.0, dtype="bfloat16"),
}
TINIEST = Case(MINILM, ((16, 16),), 1, target=1.1, by_products=True)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=[*CASES, "scores"])
    options = parser.parse_args(argv)
    bench = opened("Vectors and scores of texts", options)
    chosen = {"minilm": TINIEST} if options.quick else CASES
    for case in [case for name, case in chosen.items() if options.only in (None, name)]:
        if case.dtype == "bfloat16" and not multiplies_bfloat16():
            continue
        vectors(bench, case)
        bench.report.save(options.json)
    if options.only in (None, "scores"):
        scores(bench)
    bench.report.finish(options.json)


def multiplies_bfloat16() -> bool:
    """Whether this processor has units for it."""
    processor = Path("/proc/cpuinfo")
    return processor.exists() and "_bf16 " in processor.read_text()


def vectors(bench: Bench, case: Case) -> None:
    encoder, threads = case.encoder, bench.threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as name, ExitStack() as stack:
        encoder.write(Path(name))
        config = EngineConfig(model=name, device="cpu", dtype=case.dtype, num_threads=bench.threads)
        engine = stack.enter_context(Engine(config))

        def made(texts: list[str]) -> Vectors:
            [result] = engine.generate([Request(texts=texts, embedding=Embedding())])
            assert result.vectors is not None
            return Vectors(result.vectors, encoder.width)

        def ours(texts: list[str]) -> float:
            began = time.perf_counter()
            made(texts)
            return len(texts) / (time.perf_counter() - began)

        others = {}
        for kind in PEERS:
            try:
                peer = TextPeer(kind, name, threads=threads, first=encoder.first, dtype=case.dtype)
                others[kind] = stack.enter_context(closing(peer))
                some = words(2, 14)
                furthest = float(abs(peer.vectors(some) - made(some).numpy()).max())
                if furthest > ALIKE[case.dtype]:
                    others.pop(kind)
                    raise NotAvailableError(f"its vectors are up to {furthest:.2g} from ours")
            except NotAvailableError as error:
                bench.report.absent[kind] = str(error)
        load.settle()
        for tokens, n in progress(case.cases, case.name):
            texts = words(n, tokens - 2)
            ours(texts)
            sides = {kind: partial(peer.texts_per_s, str(tokens), texts) for kind, peer in others.items()}
            what = f"{case.name}, {n} texts of {tokens} tokens"
            rate = beside(bench, what, {OURS: partial(ours, texts), **sides}, others, str(tokens), case)
            if case.by_products:
                bench.report.add(
                    f"{what}: its products, beside the quickest product of these shapes",
                    rate * encoder.operations(tokens) / 1e9,
                    "Gop/s",
                    floor=product_rate(encoder.products, n * tokens, threads) / 1e9,
                    target=TARGET_PRODUCTS,
                )


def beside(
    bench: Bench,
    what: str,
    sides: dict[str, Callable[[], float]],
    others: dict[str, TextPeer],
    length: str,
    case: Case,
) -> float:
    """Adds the row. Our median rate."""
    turns = in_turns(bench, sides, case.rounds)
    how = {kind: f" ({peer.how.get(length, '')})" for kind, peer in others.items()}
    note = ", ".join(f"{name} {rate:.3g}{how[name]}" for name, rate in turns.medians.items() if name != OURS)
    best = turns.best
    bench.report.add(
        what if best is None else f"{what}, beside {best}",
        turns.medians[OURS],
        "texts/s",
        peer=None if best is None else turns.medians[best],
        spread=None if best is None else turns.spread(OURS, best),
        target=None if best is None else case.target,
        note=note,
    )
    return turns.medians[OURS]


def product_rate(shapes: Sequence[tuple[int, int]], rows: int, threads: int) -> float:
    """Operations a second of one product of each shape, each by the quickest that there is here: torch's, with
    weights as they are stored and turned before, or that of the engine's kernels."""
    seconds = 0.0
    for outputs, inputs in shapes:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        turned = weight.t().contiguous()
        works: list[Callable[[], object]] = own_product(x, weight, threads)
        works += [partial(torch.nn.functional.linear, x, weight), partial(torch.mm, x, turned)]
        with torch.inference_mode():
            seconds += min(best_of(work, rounds=5) for work in works)
    return 2.0 * rows * sum(outputs * inputs for outputs, inputs in shapes) / seconds


def own_product(x: torch.Tensor, weight: torch.Tensor, threads: int) -> list[Callable[[], object]]:
    """The product of the compiled kernels, where there are any."""
    library = library_for(torch.float32)
    if library is None:
        return []
    rows, outputs = len(x), len(weight)
    linear = Weights(library).linear(DenseLinear(weight.clone()))
    library.petiole_linear_scratch.restype = c_int64
    stride = library.petiole_linear_scratch(byref(linear), c_int64(rows))
    scratch, y = torch.empty(threads * stride // 4), torch.empty(rows, outputs)
    at = [c_void_p(one.data_ptr()) for one in (x, y, scratch)]
    kept = x, y, scratch, linear, weight

    def work(kept: object = kept) -> None:
        library.petiole_linear(byref(linear), c_int64(rows), *at, c_int64(stride), c_int32(threads))

    return [work]


def scores(bench: Bench) -> None:
    """Pairs whose first half is one query."""
    n, half = bench.pick(4, 100), bench.pick(16, 128)
    query = words(1, half, vocab_size=SMALL.vocab_size)[0]
    pairs = [(query, document) for document in words(n, half, seed=1, vocab_size=SMALL.vocab_size)]
    with checkpoint(SMALL) as name:
        write_tokenizer(Path(name), SMALL.vocab_size)
        config = EngineConfig(model=name, device="cpu", dtype="float32", num_threads=bench.threads)
        with Engine(config) as engine:
            load.settle()
            salts = iter(range(10**6))

            def rate(shared: bool) -> float:
                salt = str(next(salts))
                groups = [pairs] if shared else [[pair] for pair in pairs]
                began = time.perf_counter()
                engine.generate(
                    Request(texts=group, scoring=Scoring(), salt=f"{salt} {k}") for k, group in enumerate(groups)
                )
                return n / (time.perf_counter() - began)

            rate(True)
            bench.report.compare(
                f"{SMALL.name}, {n} pairs of {2 * half} tokens, {half} of them shared, beside no reuse",
                "pairs/s",
                lambda: rate(True),
                lambda: rate(False),
                rounds=bench.pick(1, 5),
                target=TARGET_REUSE,
            )


if __name__ == "__main__":
    main()
