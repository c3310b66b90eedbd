"""Videos: sizes, texts, positions and logits are those of transformers, of lists of frames and of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from petiole.contract.requests.images import View
from petiole.gpu_worker import Engine, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.models.vision.frames import PlacedVideos, TimedVideos
from petiole.gpu_worker.models.vision.pictures import GridPictures
from petiole.gpu_worker.request.prepared_images import RequestImage, rotary_positions
from petiole.gpu_worker.request.videos import Frames, Moment, Room, Videos
from tests.support.seeing import PAD, VIDEO_PAD, as_file, drawn_picture, pixels_of_transformers, tokenizer

transformers = pytest.importorskip("transformers")

OpenEngine = Callable[..., tuple[Engine, Any]]
SHOT, STILL = [drawn_picture(90, 70, seed=k) for k in range(5)], drawn_picture(64, 64, seed=9)
FILES = [as_file(frame) for frame in SHOT]
SIZE = {"shortest_edge": 4096, "longest_edge": 40_000}
ROOMY = Room(10**6, 10**6)


def video(n: int = 5) -> dict[str, Any]:
    return {"type": "video", "frames": n}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def asked(
    parts: list[Any], fps: float | None = 2.0, n: int = 6, files: list[bytes] = FILES, **more: Any
) -> Request:
    """files: of the video."""
    sampling = SamplingParams(temperature=0.0, max_tokens=n, logprobs=20, ignore_eos=True)
    images, views = list[bytes](), list[View]()
    for part in parts:
        own = {"image": [as_file(STILL)], "video": files}.get(part["type"], [])
        images += own
        views += [View(fps=fps if part["type"] == "video" else None)] * len(own)
    messages = [{"role": "user", "content": parts}]
    return Request(messages=messages, images=images, image_views=views, sampling=sampling, **more)


# ------------------------------------------------------------ sizes


@settings(max_examples=1000)
@given(
    st.integers(2, 70),
    st.integers(20, 3000),
    st.integers(20, 3000),
    st.sampled_from([(4096, 25_165_824), (131_072, 786_432), (4096, 40_000)]),
)
def test_sizes_of_qwen3(n: int, height: int, width: int, limits: tuple[int, int]) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

    videos = TimedVideos(GridPictures(16, 2, least=limits[0], most=limits[1]), 3, 2, (1, 2))
    frames = Frames(tuple(k / 2 for k in range(n)), 2.0, (width, height))
    moments = videos.moments(frames, "video", ROOMY, View())
    expected = smart_resize(n, height, width, 2, 32, *limits)
    assert moments[0].layout.size == expected[::-1]
    assert [one.numbers for one in moments] == [(k, min(k + 1, n - 1)) for k in range(0, n, 2)]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("rate", [0.5, 2.0, 7.3])
def test_texts_of_qwen3(n: int, rate: float) -> None:
    from transformers import Qwen3VLProcessor

    frames = Frames(tuple(k / rate for k in range(n)), rate, (64, 64))
    moments = TimedVideos(GridPictures(16, 2), 3, 2, (1, 2)).moments(frames, "video", ROOMY, View())
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(n)), rate)
    assert [one.written for one in moments] == [(f"<{at:.1f} seconds>", 1, 3, 2) for at in times]


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.integers(28, 500), st.integers(28, 500), st.sampled_from([0.5, 1.0, 2.0, 4.0, 24.0]))
def test_positions_of_qwen2_5(n: int, height: int, width: int, rate: float) -> None:
    """Behind a video, text goes on after the greatest number, as the model has learnt it."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    pictures = GridPictures(14, 2, least=3136, most=50_000)
    frames = Frames(tuple(k / rate for k in range(n)), rate, (width, height))
    moments = PlacedVideos(pictures, 3, 2, 4.0).moments(frames, "video", ROOMY, View())
    high, wide = smart_resize(height, width, 28, 3136, 50_000)
    assert moments[0].layout.size == (wide, high)
    begin, at, images = 7, 7, dict[int, RequestImage]()
    for one in moments:
        images[at] = RequestImage(0, one.layout.n_positions, one.layout.rotary)
        at += one.layout.n_positions
    found = rotary_positions(at + 3, images)
    assert found is not None
    grid = torch.tensor([len(moments), high // 14, wide // 14])
    expected = Qwen2_5_VLModel.get_vision_position_ids(None, begin, grid, 1, 2, 4 * (2 / rate)).numpy()
    base = np.arange(begin)[None].repeat(3, 0)
    assert (found[:, :begin] == base).all()
    assert (found[:, begin:at] == expected).all()
    assert (found[:, at:] == expected.max() + 1 + np.arange(3)).all()


@settings(max_examples=200)
@given(
    st.integers(2, 64),
    st.integers(20, 3000),
    st.integers(20, 3000),
    st.integers(1, 500),
    st.sampled_from([0, 50_000]),
)
def test_there_is_room_for_every_video(n: int, height: int, width: int, image: int, least: int) -> None:
    """Or it is refused by its field."""
    room = Room(image, 64 * 10)
    frames = Frames(tuple(k / 2 for k in range(n)), 2.0, (width, height))
    for kind, more in ((TimedVideos, (1, 2)), (PlacedVideos, 2.0)):
        videos = kind(GridPictures(16, 2, least=4096, most=2**24), 3, 2, more)
        moments, field = moments_or_field(videos, frames, room, View(min_pixels=least or None))
        assert field in (None, "video", "video.min_pixels")
        assert max((one.layout.n_positions for one in moments), default=0) <= image
        assert sum(one.layout.n_positions for one in moments) <= room.video


def moments_or_field(
    videos: Videos, frames: Frames, room: Room, view: View
) -> tuple[Sequence[Moment], str | None]:
    try:
        return videos.moments(frames, "video", room, view), None
    except InvalidRequest as error:
        return [], error.field


# ------------------------------------------------------------ logits


def _pixels(frames: list[Image.Image], size: tuple[int, int]) -> torch.Tensor:
    """The patches of pairs of frames: those of transformers' processor of pictures, of which each has a frame
    twice."""
    made = [
        pixels_of_transformers(do_resize=False)(images=[one.resize(size, 3)], return_tensors="pt")["pixel_values"]
        for one in [*frames, frames[-1]][: len(frames) + len(frames) % 2]
    ]
    found = []
    for first, second in zip(made[::2], made[1::2], strict=True):
        first, second = (one.view(len(one), 3, 2, -1) for one in (first, second))
        found.append(torch.stack([first[:, :, 0], second[:, :, 1]], dim=2).flatten(1))
    return torch.cat(found)


def reference(model: Any, frames: list[Image.Image], parts: list[Any], output: list[int], fps: float) -> Any:
    """float64 [outputs, vocab]: log-probabilities, of a prompt as transformers' processor writes it."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_picture
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as of_video

    timed = "Qwen3" in type(model).__name__
    height, width = frames[0].height, frames[0].width
    limits = SIZE["shortest_edge"], SIZE["longest_edge"]
    high, wide = (
        of_video(len(frames), height, width, 2, 32, *limits) if timed else of_picture(height, width, 32, *limits)
    )
    pairs, each = -(-len(frames) // 2), high * wide // 1024
    times = [(k / fps + min(k + 1, len(frames) - 1) / fps) / 2 for k in range(0, len(frames), 2)]
    pads = ["<|video_pad|>" * each] * pairs
    if timed:
        pads = [
            f"<{at:.1f} seconds><|vision_start|>{one}<|vision_end|>" for at, one in zip(times, pads, strict=True)
        ]
    made = (
        {}
        if not any(one["type"] == "image" for one in parts)
        else dict(pixels_of_transformers()(images=[STILL], return_tensors="pt"))
    )
    still = "<|image_pad|>" * int(made["image_grid_thw"].prod() // 4) if made else ""
    text = "<|im_start|>user\n"
    for part in parts:
        inner = {"image": still, "video": "".join(pads)}.get(part["type"], "")
        text += part["text"] if part["type"] == "text" else f"<|vision_start|>{inner}<|vision_end|>"
    text += "<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([[*tokenizer().encode(text).ids, *output]])
    assert (ids[0] == VIDEO_PAD).sum() == pairs * each
    kinds = (ids == PAD).int() + 2 * (ids == VIDEO_PAD).int()
    made["pixel_values_videos"] = _pixels(frames, (wide, high))
    made["video_grid_thw"] = torch.tensor([[pairs, high // 16, wide // 16]])
    if not timed:
        made["second_per_grid_ts"] = torch.tensor([2 / fps])
    with torch.no_grad():
        logits = model(ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **made).logits[0]
    return logits.double().log_softmax(-1).numpy()[-len(output) - 1 : -1]


def error(expected: np.ndarray, result: Any) -> float:
    places = [[token for token, _ in one.top] for one in result.logprobs]
    got = np.array([[logprob for _, logprob in one.top] for one in result.logprobs])
    expected = np.take_along_axis(expected, np.array(places), axis=1)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def with_sizes(folder: Path) -> None:
    described = json.loads((folder / "preprocessor_config.json").read_text())
    described = {"video_processor_type": "Qwen3VLVideoProcessor", **described, "size": SIZE}
    described.pop("image_processor_type", None)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(described))


TALKS = [[video(), said("What?")], [said("a"), {"type": "image"}, video(), said("b")]]


@pytest.mark.parametrize(
    ("name", "fps"), [("qwen3-vl", 2.0), ("qwen3-vl-moe", 0.7), ("qwen3.5", 3.0), ("qwen2.5-vl", 8.0)]
)
@pytest.mark.parametrize("settings", [{}, {"chunk_size": 5, "debug": True}], ids=["whole", "in chunks"])
def test_videos_anywhere_beside_text(
    name: str, fps: float, settings: dict[str, Any], open_engine: OpenEngine, folders: Any
) -> None:
    with_sizes(folders(name)[0])
    engine, model = open_engine(name, **settings)
    for parts in TALKS:
        for _ in range(2):  # the second time from cached prefixes
            (result,) = engine.generate([asked(parts, fps)])
            assert not {PAD, VIDEO_PAD} & set(result.token_ids), "which the reference would take for pictures"
            assert error(reference(model, SHOT, parts, list(result.token_ids), fps), result) < 1e-4
    assert not engine.runtime._features  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", ["rest", 400])
@pytest.mark.parametrize("n", [1, 3])
def test_time_that_is_positions_takes_of_the_context(n: int, length: Any, open_engine: OpenEngine) -> None:
    engine, _ = open_engine("qwen2.5-vl", max_model_len=400)
    videos = engine.limits.videos
    assert isinstance(videos, PlacedVideos)
    each = videos.moments(Frames((0, 1, 2, 3, 4), 1, SHOT[0].size), "", ROOMY, View())[0].layout.n_positions
    for fps in (0.4, 0.15, 0.05, 0.0084):
        time = n * (1 + int(2 * 2 * videos.per_second / fps))  # to the last of three images
        request = asked([*[video()] * n, said("?")], fps)
        request = replace(request, sampling=replace(request.sampling, logprobs=None, max_tokens=length))
        refused = None
        try:
            (result,) = engine.generate([request])
        except InvalidRequest as error:
            refused = error
        if refused is not None:
            assert refused.field == "messages"
            assert "must have at most 399 positions, of which the time between frames takes more" in str(refused)
            assert time > 300
            continue
        text = result.usage.prompt_tokens - 3 * n * each
        assert len(result.token_ids) == 400 - text - time
        assert result.stop_reason == "max_model_len"
    (result,) = engine.generate([asked([video(), said("?")])])
    assert len(result.token_ids) == 6, "the engine lives on"


def test_a_model_without_videos_refuses_them_by_field(open_engine: OpenEngine) -> None:
    engine, _ = open_engine("mistral3")
    assert engine.limits.images is not None
    with pytest.raises(InvalidRequest, match="takes no videos") as caught:
        engine.generate([asked([said("a"), video()])])
    assert caught.value.field == "messages[0].content[1]"


def test_other_limits_are_another_fingerprint(open_engine: OpenEngine) -> None:
    """A task that goes on elsewhere must get the same prompt there."""
    made = [
        open_engine(**more)[0].limits.fingerprint for more in ({}, {"video_frames": 8}, {"video_tokens": 99}, {})
    ]
    assert made[0] == made[3]
    assert len(set(made)) == 3
