"""A whole load at once, beside what others make of it: one padded batch of `generate`, and continuous batching.

Sides alternate in one process on the same threads. A peer that is not installed, or that refuses this device, is
named below the table with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from bench import load
from bench.checkpoints import QWEN3_06B, SMALL, checkpoint
from bench.load import Case
from bench.peers.transformers_peer import Transformers
from bench.report import NotAvailableError, progress
from bench.runs import Bench, arguments, opened

PEERS = {"generate": "transformers' generate", "continuous_batching": "transformers' continuous batching"}


CASES = {"small": Case(SMALL, 32, 64, 32, 32, 3), "large": Case(QWEN3_06B, 8, 32, 16, 8, 2)}
TINIEST = Case(SMALL, 2, 64, 4, 2, 1)


def measure(bench: Bench, case: Case) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(case.shape))
        try:
            peer = Transformers(model, case.shape.dtype, bench.device)
        except NotAvailableError as error:
            bench.report.absent["transformers"] = str(error)
            return
        engine = stack.enter_context(bench.engine(model, case.shape, prefix_cache="off"))
        asked = load.prompts(case.n, case.prompt)

        def ours() -> float:
            return load.at_concurrency(
                engine, load.requests(case.n, case.prompt, case.output), case.n
            ).tokens_per_s

        for method, name in PEERS.items():
            theirs: Callable[[], float] = partial(getattr(peer, method), asked, case.output)
            try:
                bench.report.compare(f"{case.name}, against {name}", "tokens/s", ours, theirs, rounds=case.rounds)
            except NotAvailableError as error:
                bench.report.absent[name] = str(error)


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu", "cuda")
    parser.add_argument("--only", choices=list(CASES))
    options = parser.parse_args(argv)
    bench = opened("A whole load at once, beside transformers", options)
    chosen = [TINIEST] if options.quick else [case for key, case in CASES.items() if options.only in (None, key)]
    for case in progress(chosen, "beside transformers"):
        measure(bench, case)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()
