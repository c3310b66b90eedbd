"""Questions about pictures on a CUDA device. The weights are random, because the content of answers does not
matter.

`questions` is a deep queue, as in the published benchmark of Kestrel: all questions are there at once, five about
every three pictures, and questions about one picture follow each other. `images` asks once about each of many
pictures, beside the time that the arithmetic alone would take. Both include decoding and cutting the pictures."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from bench.gpu.card import Card, opened, release
from bench.harness.checkpoints.decoders import write_tokenizer
from bench.harness.checkpoints.moondream import FULL_BF16, Seeing
from bench.harness.report import Report
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.models.moondream.crops import tiling_of
from petiole.gpu_worker.request import Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.text import load_tokenizer

Profile = Callable[[Report, str, Callable[[], object], int], None]

PUBLISHED: dict[int, dict[int, float]] = {
    1: {3: 41.9, 30: 16.2},
    4: {3: 50.6, 30: 22.7},
    16: {3: 55.1, 30: 43.7},
    64: {3: 57.0, 30: 48.8},
}
"""Requests a second of Kestrel on an H100, by the number of sequences at once and the tokens of an answer."""

SIZES = ((800, 557), (850, 600), (310, 481), (800, 1065), (640, 480))
"""Sizes of pictures in pixels, like those of charts on the web."""

UNIQUE = (800, 600)
PER_PICTURE = (2, 2, 1)
"""The numbers of questions about three pictures in a row."""

QUESTION = "How many bars?"


class asked:  # noqa: N801 - reads as what it is, a context
    """An engine of random weights with a tokenizer of bytes, warmed up."""

    def __init__(self, subject: Seeing, device: str, max_num_seqs: int) -> None:
        sizes = tuple(sorted({1, max_num_seqs}))
        self._opened = opened(subject, device, max_num_seqs=max_num_seqs, graph_batch_sizes=sizes)
        write_tokenizer(subject.config.text.vocab_size, Path(self._opened.folder))

    def __enter__(self) -> Engine:
        runtime = self._opened.__enter__()
        tokenizer = load_tokenizer(Path(self._opened.folder))
        self._engine = Engine(self._opened.config, runtime=runtime, tokenizer=tokenizer).start()
        self._engine.generate(list(deep_queue(6, 3, seed=1)))
        return self._engine

    def __exit__(self, *error: object) -> None:
        self._engine.shutdown(drain=False)
        del self._engine
        self._opened.__exit__(*error)
        del self._opened


def questions(
    report: Report,
    card: Card,
    subject: Seeing = FULL_BF16,
    device: str = "cuda",
    published: Mapping[int, Mapping[int, float]] = PUBLISHED,
    each: int = 0,
) -> None:
    """`each`: the number of questions for a figure; 0: as many as take some seconds."""
    for max_num_seqs, targets in published.items():
        n = each or (100 if max_num_seqs < 16 else 200)
        for n_tokens, rate in rates(subject, device, max_num_seqs, n, targets).items():
            name = f"{subject.name}: a queue of questions, {n_tokens} tokens, {max_num_seqs} at once"
            report.add(name, rate, "requests/s", target=targets[n_tokens], card="H100")
        release()  # when nothing refers to the engine any longer: the next one takes its memory


def rates(subject: Seeing, device: str, max_num_seqs: int, n: int, lengths: Iterable[int]) -> dict[int, float]:
    """Requests a second of `n` questions, by the tokens of an answer."""
    found = {}
    with asked(subject, device, max_num_seqs) as engine:
        for n_tokens in lengths:
            requests = list(deep_queue(n, n_tokens, seed=2))
            found[n_tokens] = n / seconds(engine, requests)
    return found


def images(
    report: Report,
    card: Card,
    subject: Seeing = FULL_BF16,
    device: str = "cuda",
    n: int = 64,
    profile: Profile | None = None,
) -> None:
    """Different pictures of 800 x 600; and the encoding of one alone."""
    width, height = UNIQUE
    rows, columns = tiling_of(height, width, subject.config.vision.geometry)
    encoding = subject.encode_operations(1 + rows * columns)
    with asked(subject, device, 16) as engine:
        processor, runtime = engine.limits.processor, engine.runtime
        assert processor is not None
        image = processor.prepared(Image.open(BytesIO(chart(0, UNIQUE))), 0, ImageLayout(729))
        took = encode_seconds(runtime, image)
        name = f"{subject.name}: an encode of {len(image.pixels)} crops"
        report.add(name, took * 1e3, "ms", floor=encoding / card.rate * 1e3, better="lower")
        if profile is not None:
            profile(report, f"{subject.name}, an encode", lambda: encode_seconds(runtime, image, 1), 1)
        requests = [question(chart(seed, UNIQUE), 3) for seed in range(1, n + 1)]
        rate = n / seconds(engine, requests)
        needed = encoding + subject.prefill_operations(len(QUESTION) + 6)
        name = f"{subject.name}: pictures of {width} x {height}, each asked about once, 3 tokens"
        report.add(name, rate, "images/s", floor=card.rate / needed)


def encode_seconds(runtime: Any, image: PreparedImage, rounds: int = 10) -> float:
    """Seconds of one encode after others, so that the host is ahead of the device."""
    runtime.synchronize()
    start = time.perf_counter()
    for i in range(rounds):
        runtime._enqueue(lambda slot=i % 2: runtime._executor.encode(slot, [image]), "encode")
    runtime.synchronize()
    return (time.perf_counter() - start) / rounds


def seconds(engine: Engine, requests: list[Request]) -> float:
    start = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - start


def deep_queue(n: int, n_tokens: int, seed: int) -> Iterator[Request]:
    """Questions about one picture differ in their first word, so that they share the picture and no more."""
    made, k = 0, 0
    while made < n:
        picture = chart(1000 * seed + 100_000 * n_tokens + k, SIZES[k % len(SIZES)])
        for i in range(min(PER_PICTURE[k % len(PER_PICTURE)], n - made)):
            yield question(picture, n_tokens, f"{'AB'[i]}: {QUESTION}")
            made += 1
        k += 1


def question(picture: bytes, n_tokens: int, text: str = QUESTION) -> Request:
    sampling = SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    return Request(skill=SkillCall("query", {"question": text}), images=(picture,), sampling=sampling)


def chart(seed: int, size: tuple[int, int]) -> bytes:
    """A PNG file with bars."""
    made, draw_number = Image.new("RGB", size, "white"), random.Random(seed)
    draw, (width, height) = ImageDraw.Draw(made), size
    for k in range(12):
        left, color = width * (k + 0.2) / 12, tuple(draw_number.randrange(256) for _ in range(3))
        top = height * draw_number.uniform(0.1, 0.9)
        draw.rectangle((left, top, left + width / 18, height * 0.95), fill=color)
        draw.text((left, height * 0.96), str(draw_number.randrange(10_000)), fill="black")
    file = BytesIO()
    made.save(file, "PNG", compress_level=1)
    return file.getvalue()
