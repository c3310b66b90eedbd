"""The engine driven directly, without Celery: its speed on a model, and the gain of its features.

The models are random weights in the shapes of Qwen3-0.6B and of a 6.8 M-parameter model, and petiole-tiny itself.
Compared sides (cache on and off, pipelined and blocking) are two engines in this process that take turns. A floor
is the time that the shape's bytes and operations need at the rates measured at the start."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.engine.groups import beside_dense
from bench.engine.returning import returning
from bench.harness import floors, load
from bench.harness.checkpoints.decoders import QWEN3_06B, SMALL, SMALL_LONG, TINY, Shape, checkpoint, write_adapter
from bench.harness.report import percentile, progress
from bench.harness.runs import Bench, arguments, opened
from petiole.gpu_worker import Constraint, Engine, Request, SamplingParams
from petiole.gpu_worker.runtime.device.tracing import Tracer

PREFIX_TARGET = 5.0
SHARED = 0.9
HEAD_SHARE = 1 / 3
"""The layer of petiole-tiny's head beside its others."""

DRAFTS_TARGETS = {
    ("by prompt lookup", "counted"): 0.98,
    ("by its head", "repeated"): 0.98 / (1 + HEAD_SHARE),
    ("by its head", "counted", 1): 1.1,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


# ---------------------------------------------------------------- throughput


def offline(bench: Bench) -> None:
    """All requests at once, at a growing number of rows, beside the floor of the shape."""
    cases: list[tuple[Shape, tuple[int, ...], int, int]] = [
        (TINY, bench.pick((1, 8), (1, 2, 4, 8, 16, 32, 64)), 64, bench.pick(8, 64)),
        (SMALL, bench.pick((8,), (1, 8, 32, 64)), 64, bench.pick(8, 32)),
    ]
    if bench.large:
        cases.append((QWEN3_06B, (1, 8, 16), 32, 16))
    for shape, batches, prompt, output in cases:
        machine = floors.measure(shape, bench.report)
        with checkpoint(shape) as model, bench.engine(model, shape, prefix_cache="off") as engine:
            for batch in progress(batches, f"offline, {shape.name}"):
                n = batch if shape is QWEN3_06B else max(batch, bench.pick(2, 8))
                runs = [
                    load.at_concurrency(engine, load.requests(n, prompt, output, seed=i), batch)
                    for i in range(1 if shape is QWEN3_06B else bench.pick(1, 3))
                ]
                rates = [run.tokens_per_s for run in runs]
                best = n * output / machine.batch_s(shape, n, prompt, output, batch)
                bench.report.add(
                    f"{shape.name}, {prompt} in, {output} out, {batch} at once",
                    max(rates),
                    "tokens/s",
                    floor=best,
                    samples=rates,
                )
                bench.curves.setdefault("throughput", {}).setdefault(shape.name, []).append(
                    (batch, max(rates), best)
                )


def arrivals(bench: Bench) -> None:
    """Poisson arrivals at shares of what the engine can take: TTFT and ITL."""
    with checkpoint(TINY) as model, bench.engine(model, TINY, prefix_cache="off") as engine:
        n, prompt, output = bench.pick(8, 128), 64, bench.pick(8, 32)
        capacity = load.at_concurrency(engine, load.requests(n, prompt, output), 64).requests_per_s
        bench.report.add("petiole-tiny, closed loop of 64: capacity", capacity, "requests/s")
        for share in progress(bench.pick((0.5,), (0.25, 0.5, 0.75, 0.9)), "arrivals"):
            run = load.poisson(engine, load.requests(n, prompt, output, seed=1), share * capacity)
            gaps = run.gaps_ms
            name = f"arrivals at {share:.0%} of it"
            add(bench, f"{name}: TTFT, median", run.ttft_ms(0.5), run.ttfts_ms)
            add(bench, f"{name}: TTFT, 99 of 100", run.ttft_ms(0.99))
            if gaps:  # empty if every answer came in one delta
                add(bench, f"{name}: ITL, median", percentile(gaps, 0.5))
                add(bench, f"{name}: ITL, 99 of 100", percentile(gaps, 0.99))
            bench.curves.setdefault("latency", {})[f"load {share:.0%}"] = (run.ttfts_ms, gaps)


def add(bench: Bench, name: str, milliseconds: float, samples: list[float] | None = None) -> None:
    bench.report.add(name, milliseconds, "ms", better="lower", samples=samples or ())


def pipelining(bench: Bench) -> None:
    """Pipelined against blocking on the tiny model, where nothing overlaps: the pipeline must cost nothing."""
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(TINY))
        engines = {
            mode: stack.enter_context(bench.engine(model, TINY, prefix_cache="off", pipeline=mode))
            for mode in ("on", "off")
        }
        for batch in progress(bench.pick((1,), (1, 8, 32)), "pipelining"):
            output = bench.pick(16, 128)

            def rate(mode: str, batch: int = batch, output: int = output) -> float:
                return load.at_concurrency(engines[mode], load.requests(batch, 16, output), batch).tokens_per_s

            name = f"petiole-tiny, pipelined against blocking, batch {batch}"
            sides = partial(rate, "on"), partial(rate, "off")
            bench.report.compare(name, "tokens/s", *sides, rounds=bench.pick(2, 7), target=1.0)


# ---------------------------------------------------------------- reuse


def shared_prefixes(bench: Bench) -> None:
    """90 % of a 1,024-token prompt is common: requests a second with the prefix cache on and off."""
    cases = [(SMALL, bench.pick(4, 32), bench.pick(128, 1024), bench.pick(2, 8), bench.pick(2, 3))]
    if bench.large:
        cases.append((QWEN3_06B, 16, 1024, 4, 1))
    for shape, n, length, output, rounds in cases:
        with ExitStack() as stack:
            model = stack.enter_context(checkpoint(shape))
            engines = {
                mode: stack.enter_context(bench.engine(model, shape, prefix_cache=mode, max_num_seqs=32))
                for mode in ("radix", "off")
            }
            seed = iter(range(10_000))
            work = partial(sharing, n=n, length=length, output=output, seeds=seed)
            bench.report.compare(
                f"{shape.name}, {SHARED:.0%} of {length} tokens shared, {output} out: cache on against off",
                "requests/s",
                partial(work, engines["radix"]),
                partial(work, engines["off"]),
                rounds=rounds,
                target=PREFIX_TARGET,
            )


def sharing(engine: Engine, *, n: int, length: int, output: int, seeds: Iterator[int]) -> float:
    """Requests a second. The first request computes the prefix that the others share."""
    shared = load.prompts(1, int(SHARED * length), seed=next(seeds))[0]
    tails = load.prompts(n, length - len(shared), seed=next(seeds))
    asked = [Request(prompt=shared + tail, sampling=load.greedy(output)) for tail in tails]
    return load.at_concurrency(engine, asked, 32).requests_per_s


def chat(bench: Bench) -> None:
    """Conversations that grow: each turn's prompt is the conversation so far and a question."""
    conversations, turns = bench.pick(2, 8), bench.pick(2, 6)
    system = load.prompts(1, bench.pick(32, 256))[0]
    uncached: float | None = None
    for mode in ("off", "radix", "block"):
        page_size = 16 if mode == "block" else 1
        with (
            checkpoint(SMALL) as model,
            bench.engine(model, SMALL, prefix_cache=mode, page_size=page_size) as engine,
        ):
            histories = [list(system) for _ in range(conversations)]
            ttfts: list[float] = []
            hit_rates: list[float] = []
            start = time.perf_counter()
            for turn in range(turns):
                questions = load.prompts(conversations, 48, seed=turn + 1)
                asked = [h + q for h, q in zip(histories, questions, strict=True)]
                options = load.greedy(bench.pick(4, 24))
                run = load.at_concurrency(
                    engine, [Request(prompt=p, sampling=options) for p in asked], conversations
                )
                results = [stream.result for stream in run.streams]
                histories = [p + list(r.token_ids) for p, r in zip(asked, results, strict=True)]
                ttfts += run.ttfts_ms
                usage = [result.usage for result in results]
                hit_rates.append(sum(u.cached_prompt_tokens for u in usage) / sum(u.prompt_tokens for u in usage))
            seconds = time.perf_counter() - start
        median = statistics.median(ttfts)
        name = f"chat, {conversations} x {turns} turns, cache {mode}"
        bench.report.add(f"{name}: turns a second", conversations * turns / seconds, "turns/s")
        bench.report.add(f"{name}: TTFT, median", median, "ms", peer=uncached, better="lower", samples=ttfts)
        if mode == "off":
            uncached = median
        else:
            bench.report.add(f"{name}: hit rate of the last turn", hit_rates[-1], "", samples=hit_rates)
            bench.curves.setdefault("hit_rate", {})[mode] = hit_rates


# ---------------------------------------------------------------- beside each other


def long_among_short(bench: Bench) -> None:
    """Short prompts arrive while a long one is prefilled: how much longer do they wait for their first token?"""
    length, chunk = bench.pick(512, 16_384), bench.pick(128, 512)
    shape = SMALL_LONG
    tracer = Tracer()
    options = {"max_num_seqs": 256, "chunk_size": chunk, "max_num_batched_tokens": 2 * chunk}
    with checkpoint(shape) as model, bench.engine(model, shape, tracer, prefix_cache="off", **options) as engine:
        seconds = load.at_concurrency(engine, load.requests(1, length, 2), 1).seconds
        per_second, n = 8.0, bench.pick(8, 100)
        alone = load.poisson(engine, load.requests(n, 32, 8, seed=2), per_second)
        during = load.while_prefilled(engine, length, n, per_second)
    chunks = [s["dur"] / 1e3 for s in tracer.spans() if s["line"] == "compute" and s["name"] == "prefill"]
    one_chunk, before = max(chunks), alone.ttft_ms(0.99)
    bench.report.add(f"{length}-token prompt, prefilled alone", seconds * 1e3, "ms", better="lower")
    add(bench, "short prompts alone: TTFT, 99 of 100", before, alone.ttfts_ms)
    add(bench, f"the longest chunk of {chunk} tokens", one_chunk)
    bench.report.add(
        "short prompts during it: TTFT, 99 of 100, against twice that alone and one chunk",
        during.ttft_ms(0.99),
        "ms",
        peer=2 * before + one_chunk,
        target=1.0,
        better="lower",
        samples=during.ttfts_ms,
        note=f"{len(during.streams)} prompts",
    )


def constrained(bench: Bench) -> None:
    """JSON by schema (a list that goes on while there are tokens), against the same number of free tokens."""
    n, output = bench.pick(2, 32), bench.pick(8, 96)
    constraint = Constraint("json_schema", {"type": "array", "items": SCHEMA, "minItems": output})
    options = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    text = "Extract name and age as JSON: Ana is {} and lives in Lisbon."
    asked = [Request(prompt=text.format(20 + i), sampling=options) for i in range(n)]
    bound = [replace(request, constraint=constraint) for request in asked]
    with checkpoint(TINY) as model, bench.engine(model, TINY) as engine:

        def rate(requests: list[Request]) -> float:
            return load.at_concurrency(engine, requests, n).tokens_per_s

        name = f"petiole-tiny, batch {n}: constrained by a schema against free"
        sides = (partial(rate, requests) for requests in (bound, asked))
        bench.report.compare(name, "tokens/s", *sides, rounds=bench.pick(2, 9))


def speculative(bench: Bench) -> None:
    """Prompt lookup, and the head of petiole-tiny, against one token a step: where the output repeats itself,
    which prompt lookup knows, and where it counts, which the head knows. The other one's text is new to each."""
    asked = {"counted": "Count from 101 to 160.", "repeated": "Repeat after me: " + "the quick lantern, " * 3}
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(TINY))
        drafters = {"by prompt lookup": "ngram", "by its head": "mtp", "none": "off"}
        engines = {
            by: stack.enter_context(
                bench.engine(model, TINY, speculative_tokens=4, drafts=drafts, prefix_cache="off")
            )
            for by, drafts in drafters.items()
        }
        cases = itertools.product(asked.items(), bench.pick((1,), (1, 8, 64)), list(drafters)[:2])
        for (what, text), batch, by in cases:
            _drafting(
                bench,
                f"petiole-tiny, batch {batch}, {what} text: 4 drafts a step {by} against none",
                [engines[by], engines["none"]],
                [Request(prompt=text, sampling=load.greedy(bench.pick(16, 200)))] * batch,
                bench.pick(2, 9),
                DRAFTS_TARGETS.get((by, what, batch), DRAFTS_TARGETS.get((by, what))),
            )
    if bench.large:
        with ExitStack() as stack:
            model = stack.enter_context(checkpoint(QWEN3_06B))
            sides = [
                stack.enter_context(
                    bench.engine(model, QWEN3_06B, speculative_tokens=4, drafts=drafts, prefix_cache="off")
                )
                for drafts in ("ngram", "off")
            ]
            name = f"{QWEN3_06B.name}, batch 1, repeated text: 4 drafts a step by prompt lookup against none"
            prompt = load.prompts(1, 8)[0] * 12
            _drafting(bench, name, sides, [Request(prompt=prompt, sampling=load.greedy(64))], 3, 2.2)


def _drafting(
    bench: Bench, name: str, sides: list[Engine], requests: list[Request], rounds: int, target: float | None
) -> None:
    """The tokens a second of an engine with drafts, and of one without."""

    def rate(engine: Engine) -> float:
        return load.at_concurrency(engine, requests, len(requests)).tokens_per_s

    before = sides[0].stats()
    both = (partial(rate, engine) for engine in sides)
    figure = bench.report.compare(name, "tokens/s", *both, rounds=rounds, target=target)
    after = sides[0].stats()
    drafted, held = (float(after[key]) - float(before[key]) for key in ("draft_tokens", "accepted_draft_tokens"))
    figure.note = f"{held:.0f} of {drafted:.0f} drafts held"


def lora_mix(bench: Bench) -> None:
    """Requests of four adapters and of none in the same batches, against the same requests without adapters."""
    n, output, adapters = bench.pick(3, 32), bench.pick(4, 48), bench.pick(1, 4)
    with checkpoint(SMALL) as model, tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{i}" for i in range(adapters)]
        for i, name in enumerate(names):
            write_adapter(SMALL, Path(name), seed=i)
        with bench.engine(model, SMALL, lora_slots=adapters, lora_max_rank=16) as engine:
            mixed: list[str | None] = [None, *names]

            def rate(chosen: list[str | None]) -> float:
                asked = [
                    replace(request, adapter=chosen[i % len(chosen)])
                    for i, request in enumerate(load.requests(n, 64, output))
                ]
                return load.at_concurrency(engine, asked, n).tokens_per_s

            rate(mixed)
            name = f"{SMALL.name}, batch {n}: {adapters} adapters of rank 16 and none, mixed, against none"
            sides = partial(rate, mixed), partial(rate, [None])
            bench.report.compare(name, "tokens/s", *sides, rounds=bench.pick(1, 3))


WORKLOADS: dict[str, Callable[[Bench], None]] = {
    "offline": offline,
    "arrivals": arrivals,
    "pipelining": pipelining,
    "prefixes": shared_prefixes,
    "chat": chat,
    "long": long_among_short,
    "constrained": constrained,
    "speculative": speculative,
    "lora": lora_mix,
    "groups": beside_dense,
    "returning": returning,
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu", "cuda", "auto")
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--no-large", action="store_true", help="leave out the Qwen3-0.6B shape")
    options = parser.parse_args(argv)
    bench = opened("The engine driven directly", options)
    bench.large = not (options.quick or options.no_large)
    for name in options.only:
        WORKLOADS[name](bench)
    bench.report.extra |= {"threads": torch.get_num_threads(), "device": options.device}
    if options.plots and not options.quick:
        plot(bench, Path(options.plots))
    bench.report.finish(options.json)


def plot(bench: Bench, folder: Path) -> None:
    from bench.harness import plots

    curves = bench.curves
    if "throughput" in curves:
        plots.throughput(folder / "throughput.png", curves["throughput"])
    if "latency" in curves:
        plots.latency(folder / "latency.png", curves["latency"])
    if "hit_rate" in curves:
        plots.hit_rate(folder / "hit_rate.png", curves["hit_rate"])
    plots.timeline(folder / "timeline.png", {mode: trace(bench, mode) for mode in ("on", "off")})


def trace(bench: Bench, pipeline: str) -> list[dict[str, Any]]:
    """The spans of decode steps of petiole-tiny at batch 32, in the steady state."""
    tracer = Tracer()
    with bench.engine("petiole-tiny", TINY, tracer, prefix_cache="off", pipeline=pipeline) as engine:
        load.at_concurrency(engine, load.requests(32, 16, 64), 32)
    return tracer.spans()
