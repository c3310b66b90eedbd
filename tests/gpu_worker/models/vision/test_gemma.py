"""Gemma's pictures: their sizes and pixels are those of transformers, and their text is that of its processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.images import View
from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families import towers
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.gemma_pictures import BudgetPictures, budget_pictures, square_pictures
from petiole.gpu_worker.models.vision.tower import Tower
from petiole.gpu_worker.request.prepared_images import IMAGE
from tests.support.seeing import (
    _MORE,
    PAD,
    SEEING,
    TOKENS,
    VIDEO_PAD,
    as_file,
    drawn_picture,
    gemma_pixels,
    seeing_model,
    tokenizer,
    write_seeing,
)

transformers = pytest.importorskip("transformers")

PICTURES: dict[str, Any] = {"gemma3": square_pictures, "gemma4": budget_pictures}
FILES = [as_file(drawn_picture(170, 100)), as_file(drawn_picture(64, 64, seed=1))]


def tower_config(name: str, whole: dict[str, Any] | None = None, **changes: Any) -> TowerConfig:
    kind, text, vision = SEEING[name]
    raw = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {**vision, **changes},
        **_MORE[kind],
        **(whole or {}),
    }
    return {"Gemma3": towers.gemma3, "Gemma4": towers.gemma4}[kind](raw, model_of(raw).plan)


@settings(max_examples=1000)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([70, 140, 280, 560, 1120]))
def test_sizes(height: int, width: int, budget: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * budget, 3)
    layout = BudgetPictures(16, 3, budget=budget).layout(width, height, "image", 4096)
    assert layout.size == expected[::-1]
    assert layout.n_positions == expected[0] * expected[1] // 48**2 <= budget


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 300), st.integers(5, 300), st.integers(0, 5), st.sampled_from(["gemma3", "gemma4"]))
def test_pixels(width: int, height: int, seed: int, name: str) -> None:
    processor = gemma_pixels(SEEING[name][0])
    config = tower_config(name)
    pictures = PICTURES[name](config, json.loads(processor.to_json_string()))
    picture = drawn_picture(width, height, seed)
    expected = processor(images=[picture], return_tensors="pt")
    layout = pictures.layout(width, height, "image", 4096)
    pixels = torch.from_numpy(pictures.prepared(picture, 0, layout).pixels)
    tower = Tower(config, *[None] * 5, values=torch.from_numpy(pictures.values()))  # type: ignore[arg-type]
    rows, columns = tower.axes([tower.grid(pixels)])
    values = torch.empty_like(tower._values_of(pixels))
    values[rows * tower.grid(pixels).columns + columns] = tower._values_of(pixels)  # row by row
    assert len(values) == layout.n_positions * config.merge**2
    if name == "gemma3":
        whole = values.view(8, 8, 3, 8, 8).permute(2, 0, 3, 1, 4).reshape(1, 3, 64, 64)
        assert torch.equal(whole, expected["pixel_values"])
    else:
        theirs = expected["pixel_values"][0, : len(values)]
        ours = values.view(-1, 3, 8, 8).permute(0, 2, 3, 1).flatten(1)
        assert torch.equal(ours, 2 * (theirs - 0.5))
        assert list(expected["num_soft_tokens_per_image"]) == [layout.n_positions]


def test_a_smaller_limit_is_a_smaller_budget() -> None:
    pictures = BudgetPictures(16, 3, budget=280)
    assert [pictures.layout(1000, 800, "image", most).n_positions for most in (4096, 280, 279, 100, 20)] == [
        252,
        252,
        130,
        63,
        20,
    ]


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def opened(request: pytest.FixtureRequest, folders: Callable[[str], tuple[Path, Any]]) -> Any:
    more: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 512}
    with Engine(EngineConfig(model=str(folders(request.param)[0]), **more)) as engine:
        yield request.param, engine


def asked(**more: Any) -> Request:
    return Request(sampling=SamplingParams(temperature=0.0, max_tokens=3), **more)


def _counts(name: str) -> list[int]:
    return [16, 16] if name == "gemma3" else [60, 64]


def test_text_around_pictures_is_that_of_the_processor(opened: tuple[str, Engine]) -> None:
    """It is put there before the text becomes tokens: a token may reach over its edge."""
    name, engine = opened
    begin, end = "<|vision_start|>", "<|vision_end|>"
    mark, around = (begin, "\n\n") if name == "gemma3" else ("<|image_pad|>", "")
    counts = _counts(name)
    found = engine.tokens_of(asked(prompt=f"user\n{mark} and\n{mark} what?", images=FILES))
    text = f"user\n{around}{begin}A{end}{around} and\n{around}{begin}A{end}{around} what?"
    pieces = tokenizer().encode(text.replace("A", "<|image_pad|>"), add_special_tokens=False).ids
    places = iter(counts)
    expected = [one for token in pieces for one in ([IMAGE] * next(places) if token == PAD else [token])]
    assert found == expected
    assert engine.generate([asked(prompt=f"user\n{mark} and\n{mark} what?", images=FILES)])[0].token_ids


def test_pictures_in_a_conversation(opened: tuple[str, Engine]) -> None:
    name, engine = opened
    parts = [{"type": "image"}, {"type": "text", "text": "What is <|vision_start|> or <|image_pad|>?"}]
    ids = engine.tokens_of(asked(messages=[{"role": "user", "content": parts}], images=FILES[:1]))
    assert ids.count(IMAGE) == _counts(name)[0]
    assert ids.count(TOKENS["<|image_pad|>"]) == 0


def test_a_count_that_differs_is_refused(opened: tuple[str, Engine]) -> None:
    _, engine = opened
    with pytest.raises(InvalidRequest, match="as many image tokens as images, 2, got 1") as caught:
        engine.generate([asked(prompt=[5, PAD, 6], images=FILES)])
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan must be false, got True"),
        ("gemma3", {"size": {"height": 32, "width": 64}}, "size must be 64 x 64"),
        ("gemma3", {"image_processor_type": "SiglipImageProcessor"}, "image_processor_type must be Gemma3"),
        ("gemma4", {"max_soft_tokens": 90}, "max_soft_tokens must be one of 70, 140, .*got 90"),
        ("gemma4", {"max_soft_tokens": 280}, "max_soft_tokens must fit into 256 positions, got 280"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size must be 3, as in config.json, got 2"),
        ("gemma4", {"do_rescale": False}, "do_rescale must be true, got False"),
    ],
)
def test_pictures_made_ready_otherwise_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    known = json.loads(gemma_pixels(SEEING[name][0]).to_json_string())
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {message}"):
        PICTURES[name](tower_config(name), known | changes)


@pytest.mark.parametrize(
    ("name", "whole", "changes", "message"),
    [
        ("gemma3", {"mm_tokens_per_image": 15}, {}, "must be a square whose root divides 8, .*got 15"),
        ("gemma3", {"mm_tokens_per_image": 9}, {}, "must be a square whose root divides 8, .*got 9"),
        ("gemma3", {}, {"num_attention_heads": 7}, "num_attention_heads must divide 48"),
        (
            "gemma3",
            {"image_token_index": 600},
            {},
            "image_token_index must be a whole number from 0 to 511, got 600",
        ),
        ("gemma4", {}, {"head_dim": 18}, "head_dim must be a multiple of 4.*got 18"),
        ("gemma4", {}, {"attention_bias": True}, "attention_bias must be false, got true"),
        ("gemma4", {}, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be axial, got 'yarn'"),
    ],
)
def test_towers_that_are_not_computed_are_refused(
    name: str, whole: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        tower_config(name, whole, **changes)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_a_published_folder_has_old_names(name: str, tmp_path: Path) -> None:
    """The tensors of releases, without `model.` in front and with SigLIP's own name."""
    from safetensors.torch import load_file, save_file

    write_seeing(tmp_path, name)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    old = {key.replace("vision_tower.vision_model.", "vision_tower."): value for key, value in stored.items()}
    settings = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=256)
    request = asked(prompt=[7, PAD, 8], images=FILES[:1])
    with Engine(settings) as engine:
        expected = engine.generate([request])[0].token_ids
    for at in ("vision_tower.vision_model.", "vision_tower."):
        save_file({key.replace("vision_tower.", at): value for key, value in old.items()}, file)
        with Engine(settings) as engine:
            assert engine.limits.images is not None
            assert engine.generate([request])[0].token_ids == expected


def test_videos_are_frames_behind_their_time(tmp_path: Path) -> None:
    """As transformers computes them, from the text of its processor."""
    kind = "Gemma4"
    model = seeing_model("gemma4")
    model.config.video_token_id = model.model.config.video_token_id = VIDEO_PAD
    write_seeing(tmp_path, "gemma4", model)
    processor = gemma_pixels(kind)
    described = {"max_soft_tokens": 70, "patch_size": 8, "pooling_kernel_size": 3}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(described))
    frames = [drawn_picture(90, 60, seed=k) for k in range(3)]
    made = processor(images=frames, return_tensors="pt")
    each = int(made["num_soft_tokens_per_image"][0])
    shown = " ".join(
        f"{at} <|vision_start|>{'<|video_pad|>' * each}<|vision_end|>" for at in ("00:00", "00:40", "01:20")
    )
    text = f"<|im_start|>user\n<|vision_start|>{shown}<|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"type": "video", "frames": 3}, {"type": "text", "text": "What?"}]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=20, ignore_eos=True)
    request = Request(
        messages=[{"role": "user", "content": parts}],
        images=[as_file(one) for one in frames],
        image_views=[View(fps=0.025)] * 3,
        sampling=sampling,
    )
    with Engine(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=512)) as engine:
        (result,) = engine.generate([request])
    ids = torch.tensor([[*tokenizer().encode(text).ids, *result.token_ids]])
    with torch.no_grad():
        logits = model(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=2 * (ids == VIDEO_PAD).int(),
            pixel_values_videos=made["pixel_values"],
            video_position_ids=made["image_position_ids"],
            num_frames_per_video=torch.tensor([3]),
        ).logits[0]
    expected = logits.double().log_softmax(-1)[-len(result.token_ids) - 1 : -1]
    for logprobs, known in zip(result.logprobs or (), expected, strict=True):
        for token, logprob in logprobs.top:
            assert logprob == pytest.approx(float(known[token]), abs=2e-4)
