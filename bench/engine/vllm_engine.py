"""vLLM's engine behind a worker: tokens a second at streaming readers, in turns with vLLM's own `LLM.generate`.

Both sides run vLLM under the Python of `BENCH_VLLM_PYTHON`, on the same processors, with random weights and
without a prefix cache. Redis, producer and readers share these processors."""

from __future__ import annotations

import os
from contextlib import ExitStack

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, SMALL, checkpoint
from bench.harness.load import Case
from bench.harness.report import NotAvailableError, Report, arguments
from bench.peers.children.outside import Outside
from bench.queue.serving import CLIENTS, fleet, requests

CASES = [Case(QWEN3_06B, 16, 32, 64, 16, 3, target=0.9)]
QUICK = [Case(SMALL, 4, 16, 8, 4, 1)]


def through_broker(report: Report, case: Case, threads: int) -> None:
    """Raises NotAvailableError without vLLM."""
    if not (python := os.environ.get("BENCH_VLLM_PYTHON", "")):
        raise NotAvailableError("BENCH_VLLM_PYTHON names no interpreter that has vLLM")
    longest, read = 2 * (case.prompt + case.output), CLIENTS["asyncio"]
    most = (case.concurrency, longest, case.concurrency * longest)
    cpus = os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = {
        "PETIOLE_ENGINE": "vllm",
        "PETIOLE_VLLM_PYTHON": python,
        "PETIOLE_VLLM_ARGS": f"--load-format dummy --max-model-len {longest}",
    }
    rounds: list[float] = []

    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(case.shape))
        peer = Outside("vllm", model, threads=threads, most=most)
        stack.callback(peer.close)
        stack.enter_context(fleet(model, case.shape, case.concurrency, threads, **settings))

        def served() -> float:
            seen = read(case, len(rounds))
            assert seen.tokens == case.tokens
            rounds.append(seen.tokens / seen.seconds)
            load.rest()
            return rounds[-1]

        def alone() -> float:
            rate = peer.tokens_per_s([request["prompt"] for request in requests(case, len(rounds))], case.output)
            load.rest()
            return rate

        read(Case(case.shape, 2, 8, 4, 2, 1), 99)
        report.compare(case.name, "tokens/s", served, alone, rounds=case.rounds, target=case.target)
    report.extra |= {"cpus": cpus}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each side")
    options = parser.parse_args(argv)
    report = Report("vLLM's engine through Celery, with streaming readers (peer: vLLM's LLM.generate)")
    for case in QUICK if options.quick else CASES:
        try:
            through_broker(report, case, options.threads)
        except NotAvailableError as error:
            report.absent[case.name] = str(error)
    report.finish(options.json)


if __name__ == "__main__":
    main()
