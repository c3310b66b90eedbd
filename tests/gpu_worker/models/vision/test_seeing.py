"""Models that see agree with transformers: over grids, several pictures, chunks at every place, cached prefixes and
preemptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from tests.support.seeing import PAD, SEEING, as_file, drawn_picture, reference, write_seeing

SIZES = [(170, 100), (64, 64), (90, 33), (60, 200), (33, 33), (250, 40)]
PICTURES = [drawn_picture(*size, seed=k) for k, size in enumerate(SIZES)]
FILES = [as_file(picture) for picture in PICTURES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_seeing(folder, name)
        return made[name]

    return get


@pytest.fixture
def open_engine(
    folders: Callable[[str], tuple[Path, Any]], cpu_path: str
) -> Iterator[Callable[..., tuple[Engine, Any]]]:
    opened: list[Engine] = []

    def get(name: str, **settings: Any) -> tuple[Engine, Any]:
        folder, model = folders(name)
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
        engine = Engine(EngineConfig(model=str(folder), **defaults | settings))
        opened.append(engine)
        return engine.start(), model

    yield get
    for engine in opened:
        engine.shutdown()


def ids_of(parts: list[int | str]) -> tuple[list[int], list[int]]:
    """Token ids with a placeholder for each picture, and which pictures. parts: ids, and numbers of pictures as
    text."""
    return [PAD if isinstance(one, str) else one for one in parts], [int(one) for one in parts if isinstance(one, str)]


def asked(parts: list[int | str], n: int = 6, **more: Any) -> Request:
    ids, pictures = ids_of(parts)
    sampling = SamplingParams(temperature=0.0, max_tokens=n, logprobs=20, ignore_eos=True)
    return Request(prompt=ids, images=[FILES[k] for k in pictures], sampling=sampling, **more)


def error(model: Any, parts: list[int | str], result: Any) -> float:
    """Of the log-probabilities of the likeliest tokens, at each token of an output."""
    ids, pictures = ids_of(parts)
    expected = reference(model, [*ids, *result.token_ids], [PICTURES[k] for k in pictures])
    expected = expected[-len(result.token_ids) - 1 : -1]
    places = [[token for token, _ in one.top] for one in result.logprobs]
    got = np.array([[logprob for _, logprob in one.top] for one in result.logprobs])
    expected = np.take_along_axis(expected, np.array(places), axis=1)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


PROMPTS: list[list[int | str]] = [
    [7, 8, "0", 9, 10],
    ["1", 4],
    [5, "2", 30, "3", 6, 7, "0", 11],
    [5, "4", 12, 13, "4", 14, "5", 6],
    [3, 4, 5, 6],
]


@pytest.mark.parametrize("name", SEEING)
def test_pictures_anywhere_beside_text(name: str, open_engine: Callable[..., Any]) -> None:
    engine, model = open_engine(name)
    for parts, result in zip(PROMPTS, engine.generate([asked(parts) for parts in PROMPTS]), strict=True):
        assert error(model, parts, result) < 1e-4
