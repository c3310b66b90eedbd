"""Questions about pictures: beside the reference implementation; and a second question about the same picture.

The models are Moondream 2 and Qwen3-VL 2B in their full sizes with random weights, in bf16, and
petiole-tiny-vision. Moondream's reference answers one question at a time, so its rate is measured over one or two
questions, however many come at once. Qwen3-VL's peer is transformers.
Each question has a new picture, except second questions. Their rows compare the time to the first token with that
of the first question, in an idle engine. `--quick` takes four layers of Qwen3-VL, and no full Moondream.

`--only` measures single parts: the file that `--json` names keeps the figures of the others. The folder that
`--checkpoint` names keeps the random weights.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from bench.harness import load
from bench.harness.checkpoints import moondream, qwen_vl
from bench.harness.report import Measurement, NotAvailableError, Report, compare, progress
from bench.harness.runs import Bench, arguments, opened
from bench.peers.moondream_peer import Reference
from bench.peers.transformers_eyes import Eyes
from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import IMAGE
from petiole.gpu_worker.request.skills import SkillCall

TOKENS = 30
QUESTIONS = ("What is in this picture?", "How many of them are there, and where?")
SECOND_TARGET = 0.1
FASTER = 1.3
"""Than transformers."""
TINY = "petiole-tiny-vision"
SEEN = 1024, 768


@dataclass(frozen=True)
class Case:
    """`n` questions at once, each with a picture of `width` x `height` pixels."""

    width: int
    height: int
    n: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.width} x {self.height}, {self.n} at once"


CASES = {
    "one": (Case(378, 378, 1, 2), Case(800, 600, 1, 1)),
    "four": (Case(378, 378, 4, 1),),
    "sixteen": (Case(378, 378, 16, 1),),
}
PARTS = ("tiny", "qwen3-vl", "second", *CASES)
ROWS = 16


@dataclass
class Pictures:
    """Different JPEG files."""

    seeds: Iterator[int] = field(default_factory=count)

    def new(self, width: int, height: int) -> bytes:
        pixels = np.random.default_rng(next(self.seeds)).integers(0, 256, (9, 12, 3), dtype=np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        return file.getvalue()


def asked(data: bytes, question: str, tokens: int = TOKENS) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return Request(skill=SkillCall("query", {"question": question}), images=[data], sampling=sampling)


def beside_reference(
    bench: Bench,
    engine: Engine,
    reference: Reference,
    pictures: Pictures,
    cases: Sequence[Case],
    json_path: str | None,
) -> None:
    def ours(case: Case) -> float:
        requests = [asked(pictures.new(case.width, case.height), QUESTIONS[0]) for _ in range(case.n)]
        return 60 * load.at_concurrency(engine, requests, case.n).requests_per_s

    def theirs(case: Case) -> float:
        files = [pictures.new(case.width, case.height) for _ in range(min(case.n, 2))]
        began = time.perf_counter()
        for file in files:
            reference.query(file, QUESTIONS[0], TOKENS)
        return 60 * len(files) / (time.perf_counter() - began)

    reference.query(pictures.new(378, 378), QUESTIONS[0], 1)
    for case in progress(cases, "beside the reference"):
        value, peer, spread = compare(partial(ours, case), partial(theirs, case), rounds=case.rounds)
        bench.report.add(
            f"Moondream 2, bf16, {case.name}: {TOKENS} tokens about each picture",
            value,
            "answers/min",
            peer=peer,
            spread=spread,
            target=1.0,
        )
        bench.report.save(json_path)


def second_questions(
    bench: Bench, engine: Engine, name: str, size: tuple[int, int], rounds: int, pictures: Pictures
) -> None:
    """Second questions; and the very first question to a new engine, which must cost no more than later ones."""
    firsts, seconds, new = list[float](), list[float](), engine.stats()["finished"] == 0
    for _ in range(1 + rounds):
        picture = pictures.new(*size)
        for question, ttfts in zip(QUESTIONS, (firsts, seconds), strict=True):
            ttfts += load.at_concurrency(engine, [asked(picture, question, 2)], 1).ttfts_ms
    at = f"{name}, {size[0]} x {size[1]}: TTFT of"
    very_first, usual, second = firsts[0], statistics.median(firsts[1:]), statistics.median(seconds[1:])
    if new:
        bench.report.add(f"{at} the very first question", very_first, "ms", peer=usual, better="lower")
    bench.report.add(f"{at} a question about a new picture", usual, "ms", better="lower", samples=firsts[1:])
    ratios = [b / a for a, b in zip(firsts[1:], seconds[1:], strict=True)]
    bench.report.add(
        f"{at} a second question about it, beside the first",
        second,
        "ms",
        peer=usual,
        spread=(min(ratios), max(ratios)),
        better="lower",
        target=SECOND_TARGET,
        samples=seconds[1:],
    )


def resident_gib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def weights_gib(folder: Path) -> float:
    return (folder / "model.safetensors").stat().st_size / 2**30


def engine_of(bench: Bench, model: str, rows: int) -> Engine:
    return Engine(
        EngineConfig(
            model=model,
            device="cpu",
            num_threads=bench.threads,
            max_num_seqs=rows,
            num_pages=(rows + 1) * 1024,
        )
    )


def full(bench: Bench, parts: Sequence[str], kept: str | None, json_path: str | None) -> None:
    pictures, cases = Pictures(), [case for part in CASES if part in parts for case in CASES[part]]
    with ExitStack() as stack:
        folder = Path(kept) if kept else stack.enter_context(moondream.checkpoint())
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            moondream.write(moondream.FULL, folder)
        began = time.perf_counter()
        engine = stack.enter_context(engine_of(bench, str(folder), ROWS))
        if "second" in parts:
            bench.report.add("Moondream 2, bf16: start", time.perf_counter() - began, "s", better="lower")
            second_questions(bench, engine, "Moondream 2, bf16", (378, 378), 3, pictures)
            second_questions(bench, engine, "Moondream 2, bf16", (800, 600), 2, pictures)
            note = f"weights {weights_gib(folder):.1f}, room for {ROWS} questions at once with their pictures"
            name = "Moondream 2, bf16: memory of the process"
            bench.report.add(name, resident_gib(), "GiB", better="lower", note=note)
            bench.report.save(json_path)
        if not cases:
            return
        try:
            reference = Reference(folder, moondream.FULL)
        except NotAvailableError as error:
            bench.report.absent["the reference implementation"] = str(error)
        else:
            beside_reference(bench, engine, reference, pictures, cases, json_path)


def beside_transformers(bench: Bench, kept: str | None, json_path: str | None) -> None:
    """Qwen3-VL: whole answers and first tokens about new pictures, then second questions."""
    name = "Qwen3-VL 2B" + (", four layers" if bench.quick else "") + ", bf16"
    pictures = Pictures()
    with ExitStack() as stack:
        folder = Path(kept or stack.enter_context(TemporaryDirectory(prefix="petiole-bench-")))
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            qwen_vl.write(qwen_vl.QUICK if bench.quick else qwen_vl.FULL, folder)
        engine = stack.enter_context(engine_of(bench, str(folder), 4))
        try:
            peer = Eyes(folder)
        except NotAvailableError as error:
            bench.report.absent["transformers"] = str(error)
        else:
            for tokens, what in progress(((TOKENS, f"{TOKENS} tokens"), (1, "a first token")), "transformers"):

                def ours(tokens: int = tokens) -> float:
                    request = asked(pictures.new(*SEEN), QUESTIONS[0], tokens)
                    return 60 * load.at_concurrency(engine, [request], 1).requests_per_s

                def theirs(tokens: int = tokens) -> float:
                    data = pictures.new(*SEEN)
                    ids = engine.tokens_of(asked(data, QUESTIONS[0]))
                    whole = [qwen_vl.PAD if token == IMAGE else token for token in ids]
                    began = time.perf_counter()
                    peer.answer(data, whole, qwen_vl.PAD, tokens)
                    return 60 / (time.perf_counter() - began)

                ours(), theirs()
                bench.report.compare(
                    f"{name}, {SEEN[0]} x {SEEN[1]}: {what} about each picture",
                    "answers/min",
                    ours,
                    theirs,
                    rounds=bench.pick(1, 5),
                    target=FASTER,
                )
                bench.report.save(json_path)
        second_questions(bench, engine, name, SEEN, bench.pick(1, 5), pictures)
        bench.report.save(json_path)


def resume(report: Report, earlier: Path) -> None:
    """Take over the figures of an earlier run, until they are measured again."""
    if earlier.exists():
        record = json.loads(earlier.read_text())
        names = [each.name for each in fields(Measurement)]
        report.results = [Measurement(**{name: one[name] for name in names}) for one in record["results"]]
        report.began -= record["seconds"]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="+")
    parser.add_argument("--checkpoint", help="a folder for the drawn weights of the full models, which stay there")
    options = parser.parse_args(argv)
    bench, parts = opened("Questions about pictures", options), options.only or PARTS
    if options.only and options.json:
        resume(bench.report, Path(options.json))
    if "tiny" in parts:
        with engine_of(bench, TINY, 8) as engine:
            for size in ((320, 240), (800, 600)):
                second_questions(bench, engine, TINY, size, bench.pick(2, 41), Pictures())
        bench.report.save(options.json)
    if "qwen3-vl" in parts:
        beside_transformers(bench, options.checkpoint and f"{options.checkpoint}/qwen3-vl", options.json)
    if not options.quick and not set(parts) <= {"tiny", "qwen3-vl"}:
        full(bench, parts, options.checkpoint, options.json)
    latest = {result.name: result for result in bench.report.results}
    bench.report.results = list(latest.values())
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()
