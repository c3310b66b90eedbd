"""Images in prompts: their positions, their encode steps, what is cached of them, and how chunks treat them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petiole.gpu_worker import Engine, InvalidRequest
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.request.prepared_images import ImagePlace, PreparedImage, Region, whole_regions
from petiole.gpu_worker.scheduling.priorities import admission
from tests.support.toy_decoder import (
    LeadingToyDecoder,
    SeeingToyDecoder,
    continuation,
    embedded_image,
    value_runtime,
)
from tests.support.toy_engine import request, toy_engine
from tests.support.trials import rest

OpenEngine = Callable[..., Engine]
N = 12


def image(seed: int, height: int, crops: int = 1) -> PreparedImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (crops, height, 2, 3), np.uint8)
    return PreparedImage(content_hash=seed << 100, n_positions=height, pixels=pixels)


@pytest.fixture
def open_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenEngine:
    def get(kind: type[SeeingToyDecoder] = SeeingToyDecoder, **config: Any) -> Engine:
        machine = {"max_num_seqs": 8, "image_cache_bytes": 0, "num_pages": 200, "prefix_cache": "radix", **config}
        rng = random.Random(7)
        runtime = value_runtime(
            tmp_path, monkeypatch, lambda: time.sleep(rng.random() * 0.0005), kind=kind, **machine
        )
        return toy_engine(runtime=runtime, text=False, **machine)

    return get


def asked(parts: list[int | PreparedImage], n: int = N, **more: Any) -> Any:
    images = [part for part in parts if isinstance(part, PreparedImage)]
    places = iter(range(len(images)))
    prompt = [ImagePlace(next(places)) if isinstance(part, PreparedImage) else part for part in parts]
    return request(prompt, n, images=images, ignore_eos=True, **more)


def expected(parts: Any, n: int = N, rotary: Any = ()) -> tuple[int, ...]:
    prompt: list[Any] = [
        embedded_image(torch.from_numpy(part.pixels)) if isinstance(part, PreparedImage) else part
        for part in parts
    ]
    source = continuation(prompt, rotary)
    return tuple(next(source)[0] for _ in range(n))


def encoded(engine: Engine) -> list[int]:
    """How many images each encode step had."""
    found: list[int] = engine.runtime._decoder.encoded  # type: ignore[attr-defined]
    return found


PROMPTS: list[list[int | PreparedImage]] = [
    [1, image(1, 7), 2, 3],
    [1, 2, image(2, 20), 9],
    [image(3, 1), 4],
    [1, image(4, 5), 2, image(5, 3), 8, 9, image(4, 5), 7],
    [3, 1, 4],
    [1, image(1, 7), 2, 9],
]


@pytest.mark.parametrize("pipeline", rest(["on", "off"]))
@pytest.mark.parametrize("policy", ["pipelined", "drain", "mixed"])
@pytest.mark.parametrize(
    ("cache", "page_size", "chunk"), [("radix", 1, 20), ("radix", 1, 512), ("block", 16, 25), ("off", 4, 20)]
)
def test_images_anywhere_beside_text_answer_as_without_an_engine(
    open_engine: OpenEngine, pipeline: str, policy: str, cache: str, page_size: int, chunk: int
) -> None:
    machine = {"prefix_cache": cache, "page_size": page_size, "chunk_size": chunk, "prefill_policy": policy}
    with open_engine(pipeline=pipeline, **machine) as engine:
        for _ in range(2):
            handles = [engine.submit(asked(parts)) for parts in PROMPTS]
            for parts, handle in zip(PROMPTS, handles, strict=True):
                assert handle.result(timeout=60).token_ids == expected(parts)
        assert not engine.runtime._features, "embeddings that were used are dropped"  # type: ignore[attr-defined]


def test_a_cached_image_is_not_encoded_again(open_engine: OpenEngine) -> None:
    picture = image(1, 7)
    with open_engine() as engine:
        engine.generate([asked([1, picture, 2, 3])])
        assert encoded(engine) == [1]
        result = engine.generate([asked([1, picture, 5, 6])])[0]
        assert result.usage.cached_prompt_tokens == 8
        assert result.token_ids == expected([1, picture, 5, 6])
        assert encoded(engine) == [1]
        other = engine.generate([asked([1, image(2, 7), 5, 6])])[0]
        assert other.usage.cached_prompt_tokens == 1
        assert encoded(engine) == [1, 1]


def test_two_questions_about_one_image_encode_it_once(open_engine: OpenEngine) -> None:
    picture = image(1, 20)
    with open_engine() as engine:
        engine.pause()
        handles = [engine.submit(asked([1, picture, k])) for k in (2, 3, 4)]
        engine.resume()
        for k, handle in zip((2, 3, 4), handles, strict=True):
            assert handle.result(timeout=30).token_ids == expected([1, picture, k])
        assert sum(encoded(engine)) == 1


@pytest.mark.parametrize(
    ("cache", "page_size", "most"),
    rest(
        [
            *[("radix", 1, 10), ("block", 16, 1), ("radix", 1, None), ("radix", 1, 0), ("radix", 1, 30)],
            *[("block", 1, 10), ("block", 16, None), ("block", 16, 0), ("off", 4, None)],
        ],
        short=2,
    ),
)
def test_questions_about_the_image_of_a_running_one_are_answered_wherever_its_publication_ends(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, cache: str, page_size: int, most: int | None
) -> None:
    """The run that makes a fork ends before the image, at either end of it, inside it and behind it."""
    machine = {"prefix_cache": cache, "page_size": page_size, "prefix_cache_max_pages": most}
    with open_engine(**machine) as engine:
        for run in (1, 2, 3, 16, 21, 22):
            monkeypatch.setattr(admission, "RUN_TOKENS", run)
            picture, read = image(run, 20), threading.Event()
            prompts = [[1, picture, *rest] for rest in ([2, 3], [2, 3, 4, 7], [9, 8, 7, 3, 2, 1, 4, 9, 8])]
            first = engine.submit(asked(prompts[0], 30), on_delta=lambda *_, read=read: read.set())
            assert read.wait(30)
            handles = [first, *(engine.submit(asked(prompt)) for prompt in prompts[1:])]
            for prompt, handle, n in zip(prompts, handles, (30, N, N), strict=True):
                assert handle.result(timeout=60).token_ids == expected(prompt, n)


@pytest.mark.parametrize(("same", "reused"), [(11, 32), (10, 0)])
def test_the_block_cache_reuses_an_image_with_the_text_that_fills_its_last_page(
    open_engine: OpenEngine, same: int, reused: int
) -> None:
    text = list(range(7, 7 + same))
    with open_engine(prefix_cache="block", page_size=16) as engine:
        engine.generate([asked([1, image(1, 20), *text, 5, 6, 5])])
        result = engine.generate([asked([1, image(1, 20), *text, 6, 5, 6])])[0]
        assert result.usage.cached_prompt_tokens == reused
        assert sum(encoded(engine)) == 1 + (reused == 0)


def test_several_images_are_encoded_in_one_step_within_its_limit(open_engine: OpenEngine) -> None:
    with open_engine() as engine:
        engine.pause()
        handles = [engine.submit(asked([1, image(10 + k, 4, crops=1 + k % 2), 2])) for k in range(6)]
        engine.resume()
        for k, handle in enumerate(handles):
            assert handle.result(timeout=30).token_ids == expected([1, image(10 + k, 4, crops=1 + k % 2), 2])
        assert sum(encoded(engine)) == 6
        assert 1 < max(encoded(engine)) <= 4


def test_one_image_of_a_bidirectional_prefix_has_a_namespace(open_engine: OpenEngine) -> None:
    """BOS sees the image: nothing of it is shared with another image, or with text."""
    with open_engine(LeadingToyDecoder, chunk_size=21) as engine:
        for parts, cached in (
            ([1, image(1, 7), 2], 0),
            ([1, image(1, 7), 3], 8),
            ([1, image(2, 7), 2], 0),
            ([1, 2, 3], 0),
            ([1, image(1, 7), 3, 4], 9),
        ):
            result = engine.generate([asked(parts)])[0]
            assert result.usage.cached_prompt_tokens == cached
            assert result.token_ids == expected(parts)


@pytest.mark.parametrize("kind", [SeeingToyDecoder, LeadingToyDecoder])
def test_a_preempted_request_has_its_image_encoded_again(
    open_engine: OpenEngine, kind: type[SeeingToyDecoder]
) -> None:
    prompts = [[1, image(20 + k, 20), k] for k in range(4)]
    with open_engine(kind, num_pages=80, prefix_cache="off", chunk_size=21) as engine:
        handles = [engine.submit(asked(parts, 40)) for parts in prompts]
        for parts, handle in zip(prompts, handles, strict=True):
            assert handle.result(timeout=60).token_ids == expected(parts, 40)
        assert engine.stats()["preemptions"]
        assert sum(encoded(engine)) > 4
        assert not engine.runtime._features  # type: ignore[attr-defined]


def test_a_cancelled_request_leaves_no_embeddings(open_engine: OpenEngine) -> None:
    with open_engine(chunk_size=20) as engine:
        for round_ in range(6):
            handles = [engine.submit(asked([1, image(100 * round_ + k, 20), 2])) for k in range(8)]
            for handle in handles[::2]:
                handle.cancel()
            for handle in handles:
                handle.result(timeout=30)
        engine.pause()
        assert not engine.runtime._features  # type: ignore[attr-defined]


def test_a_resumed_request_with_an_image_answers_the_same(open_engine: OpenEngine) -> None:
    parts = [1, image(1, 7), 2]
    bins: list[Any] = []
    with open_engine(prefix_cache="off") as engine:
        whole = engine.submit(asked(parts), on_delta=lambda _, d: bins.extend(d.bins or ())).result(timeout=30)
        for n in range(1, N):
            again = asked(parts, resume_token_ids=whole.token_ids[:n], resume_bins=bins[:n])
            assert engine.generate([again])[0].token_ids == whole.token_ids == expected(parts)


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ({"chunk_size": 20}, 21, "chunk_size"),
        ({"max_num_batched_tokens": 20}, 21, "max_num_batched_tokens"),
        ({"max_model_len": 22}, 23, "max_model_len"),
    ],
)
def test_a_setting_that_cannot_hold_a_region_is_refused_at_start(
    open_engine: OpenEngine, setting: dict[str, int], value: int, named: str
) -> None:
    with pytest.raises(ModelError, match=f"{named}: must be at least {value}.*got {value - 1}"):
        open_engine(LeadingToyDecoder, **setting).start()


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (asked([1, image(1, 21), 2]), "images[0]"),
        (asked([1, image(1, 5, crops=5), 2]), "images[0]"),
        (asked([1, *(image(k, 2) for k in range(4)), 2]), "images"),
        (request([1, 2], images=[image(1, 2)]), "images"),
        (request([1, ImagePlace(0)]), "prompt[1]"),
        (request([1, ImagePlace(1)], images=[image(1, 2)]), "prompt[1]"),
    ],
)
def test_images_that_do_not_fit_are_refused_by_field(open_engine: OpenEngine, bad: Any, field: str) -> None:
    with open_engine() as engine, pytest.raises(InvalidRequest) as caught:
        engine.generate([bad])
    assert caught.value.field == field


def test_an_image_that_must_begin_the_prompt_is_refused_elsewhere(open_engine: OpenEngine) -> None:
    with open_engine(LeadingToyDecoder) as engine, pytest.raises(InvalidRequest, match=r"images\[0\].*behind 2"):
        engine.generate([asked([1, 2, image(1, 3), 4])])


def turned(seed: int) -> PreparedImage:
    """2 x 3 positions of two axes."""
    rotary = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]], np.int32)
    return replace(image(seed, 6), rotary=rotary)


@pytest.mark.parametrize(("cache", "chunk"), [("radix", 20), ("off", 20), ("off", 512)])
def test_rotary_positions_of_an_image_are_its_own(open_engine: OpenEngine, cache: str, chunk: int) -> None:
    """They are fewer than its KV positions. The text behind it goes on from there, decoded or computed again."""
    parts = [1, 2, turned(5), 3, turned(6), 4, 7]
    rotary = [
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 6, 7, 7, 7, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10],
    ]
    tokens = expected(parts, 30, rotary)
    assert tokens != expected(parts, 30)
    with open_engine(prefix_cache=cache, chunk_size=chunk, num_pages=100) as engine:
        handles = [engine.submit(asked(parts, 30)) for _ in range(5)]
        assert [handle.result(timeout=60).token_ids for handle in handles] == [tokens] * 5
        assert engine.stats()["preemptions"] or cache == "radix"


def test_no_chunk_ends_inside_a_region() -> None:
    regions = (Region(0, 8, True), Region(10, 14, False))
    ends = [whole_regions(regions, 0, room) for room in range(18)]
    assert ends == [0] * 8 + [8, 9, 10, 10, 10, 10, 14, 15, 16, 17]
    assert [whole_regions(regions, 1, room) for room in range(9)] == [0] * 7 + [7, 8]
    assert [whole_regions(regions, 10, room) for room in range(6)] == [0] * 4 + [4, 5]


@pytest.mark.parametrize("policy", ["pipelined", "drain", "mixed"])
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16), ("off", 4)])
@pytest.mark.parametrize("chunk", rest([3, 7, 1]))
def test_chunks_end_inside_causal_images(
    open_engine: OpenEngine, policy: str, cache: str, page_size: int, chunk: int
) -> None:
    machine = {"prefix_cache": cache, "page_size": page_size, "chunk_size": chunk, "prefill_policy": policy}
    with open_engine(debug=True, **machine) as engine:
        for _ in range(2):
            handles = [engine.submit(asked(parts)) for parts in PROMPTS]
            for parts, handle in zip(PROMPTS, handles, strict=True):
                assert handle.result(timeout=60).token_ids == expected(parts)
        assert not engine.runtime._features  # type: ignore[attr-defined]


def test_a_row_that_is_cut_inside_an_image_publishes_what_ends_before_it(open_engine: OpenEngine) -> None:
    """A request is cancelled with a part of its image computed: the next one goes on behind the text before it."""
    text = [1, 2, 3, 4, 5]
    with open_engine(chunk_size=2, debug=True) as engine:
        for k in range(30):
            handle = engine.submit(asked([*text, image(200 + k, 20), 9]))
            time.sleep(0.002 * (k % 7))
            handle.cancel()
            handle.result(timeout=30)
        parts = [*text, image(300, 20), 9]
        result = engine.generate([asked(parts)])[0]
        assert result.token_ids == expected(parts)
        assert result.usage.cached_prompt_tokens == len(text)
        assert not engine.runtime._features  # type: ignore[attr-defined]
