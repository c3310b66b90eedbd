"""The training of the model that sees: pictures and their answers, a run that goes on, and what is exported, which
answers in the engine, and in transformers, as in training."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import ImagePlace
from training import model as text_model
from training.vision import tokens as tokens_
from training.vision.batches import Batch, batch_of, draw_batch, grouped
from training.vision.evaluate import ask, file_of, overlaps, right_points, score
from training.vision.export import export
from training.vision.losses import nearby
from training.vision.model import Shape, SmallQwen, TowerShape
from training.vision.pictures import COLORS, Question, Shape as DrawnShape, ask_all, ask_pair, draw_scene, paint
from training.vision.tokens import FIRST_NUMBER, IM_END, VOCAB_SIZE, answer_of, row_of, text_of
from training.vision.train import answers_of, features_of, load_model, losses, train

TOKENIZER = tokens_.build()
TINY = Shape(
    TowerShape(32, 48, 2, 2, num_position_embeddings=16, deepstack_visual_indexes=(0,)),
    text_model.Shape(VOCAB_SIZE, 64, 96, 2, 2, 1, 32),
)


def drawn(seed: int, shape: Shape = TINY) -> SmallQwen:
    """A model whose every weight matters, in numbers that bfloat16 holds."""
    torch.manual_seed(seed)
    model = SmallQwen(shape)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and not name.startswith("text.model.embed"):
                torch.nn.init.normal_(weight, std=1.3 * weight.shape[1] ** -0.5)
            elif weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
        model.text.model.embed_tokens.weight.copy_(model.table())
        model.numbers.weight.zero_()
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    return model.eval()


def asked_of(seed: int, pair: bool) -> tuple[Batch, list[Question], list[bytes]]:
    owns = [Random(seed), Random(seed + 1)][: 1 + pair]
    scenes = [draw_scene(own, (130, 110)) for own in owns]
    questions = ask_pair((scenes[0], scenes[1]), Random(seed)) if pair else ask_all(scenes[0], Random(seed))
    states = [own.getstate() for own in owns]
    files = [file_of(scene, own) for scene, own in zip(scenes, owns, strict=True)]
    for own, state in zip(owns, states, strict=True):
        own.setstate(state)
    return batch_of(TOKENIZER, TINY.tower, scenes, owns, len(owns), [questions]), questions, files


def rows_of_logits(model: SmallQwen, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each row its tokens and logits [L, vocab]."""
    with torch.no_grad():
        hidden, table = answers_of(model, batch, features_of(model, batch))
    return [
        (tokens, logits)
        for group, states in zip(batch.groups, hidden, strict=True)
        for tokens, logits in zip(group.asked.tokens, F.linear(states, table), strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_asked_and_answered_comes_back_from_its_tokens(seed: int) -> None:
    rng = Random(seed)
    for question in ask_all(draw_scene(rng, (150, 110)), rng):
        row = row_of(TOKENIZER, question)
        assert TOKENIZER.decode(row.tokens[row.start : -1]) == answer_of(question)
        assert TOKENIZER.decode(row.tokens[: row.start]).startswith(text_of(question))
        assert row.tokens[-1] == IM_END
        located = len(question.found) * {"point": 2, "detect": 4}.get(question.skill, 0)
        numbers = [token for token in row.tokens[row.start :] if token >= FIRST_NUMBER]
        assert not located or len(numbers) == located
        assert len(row.tokens) <= 70


@pytest.mark.parametrize(
    "text", ["1024 and 007, 3", "naïve\n\t漢字 [{", '[{"bbox_2d": [1, 20,  300]', "<|unused 3|>"]
)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == text


@pytest.mark.parametrize("pair", [False, True])
def test_a_row_is_computed_as_if_alone(pair: bool) -> None:
    model = drawn(1)
    batch, questions, _ = asked_of(3, pair)
    together = rows_of_logits(model, batch)
    assert len(together) == len(questions)
    for question in questions:
        (group,) = grouped(TOKENIZER, [[question]])
        ((tokens, alone),) = rows_of_logits(model, Batch(**{**vars(batch), "groups": [group]}))
        matches = [
            logits[: len(tokens)] for other, logits in together if other[: len(tokens)].tolist() == tokens.tolist()
        ]
        assert any(torch.allclose(logits, alone, atol=1e-4) for logits in matches)


@pytest.mark.parametrize("pair", [False, True])
def test_an_exported_model_answers_in_the_engine_as_in_training(pair: bool, tmp_path: Path) -> None:
    model = drawn(2)
    export(model, tmp_path)
    batch, questions, files = asked_of(5, pair)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=4, num_pages=2000)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    with Engine(config) as engine:
        for tokens, logits in rows_of_logits(model, batch):
            row = next(
                row
                for row in (row_of(TOKENIZER, one) for one in questions)
                if row.tokens == tokens.tolist()[: len(row.tokens)]
            )
            expected = logits.log_softmax(-1)
            pictures = [
                token
                for k in range(len(files))
                for token in (tokens_.VISION_START, ImagePlace(k), tokens_.VISION_END)
            ]
            for n in (row.start, len(row.tokens) - 1):
                prompt = [*TOKENIZER.encode("<|im_start|>user\n").ids, *pictures, *row.tokens[:n]]
                (result,) = engine.generate([Request(prompt=prompt, images=files, sampling=sampling)])
                assert result.logprobs is not None
                for token, logprob in result.logprobs[0].top:
                    assert logprob == pytest.approx(float(expected[n - 1, token]), abs=2e-4)
        answers = ask(engine, files, questions)
        assert all(0 <= one <= 1 for k, question in enumerate(questions) for one in score(question, answers[k]))


def test_transformers_reads_what_is_exported(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model = drawn(3)
    export(model, tmp_path)
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    batch, _, _ = asked_of(7, pair=False)
    tokens, logits = rows_of_logits(model, batch)[0]
    described = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert described.size["longest_edge"] == 43_008
    from io import BytesIO

    from PIL import Image

    made = described(images=[Image.open(BytesIO(asked_of(7, pair=False)[2][0]))], return_tensors="pt")
    ids = torch.cat([batch.prefix, tokens])[None]
    with torch.no_grad():
        found = theirs(
            ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == tokens_.IMAGE).int(), **made
        ).logits[0, len(batch.prefix) :]
    assert torch.allclose(found, logits, atol=2e-3)


def test_the_tower_learns_alone_and_then_answers_are_learnt() -> None:
    batch = draw_batch(TOKENIZER, Random(5), TINY.tower, 4, asks=False)
    assert not batch.groups
    assert set(losses(drawn(1), batch)[0]) == {"cells", "deep1"}
    for seed in range(6):
        batch = draw_batch(TOKENIZER, Random(seed), TINY.tower, 4, asks=True)
        parts, right = losses(drawn(1), batch)
        assert all(torch.isfinite(part) for part in parts.values())
        for group, own in zip(batch.groups, right, strict=True):
            assert own.shape == group.learnt.shape
            assert own[~group.learnt].all()
            assert not (group.near & ~group.learnt).any()


def test_a_stopped_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    args = argparse.Namespace(
        minutes=0.02,
        threads=1,
        checkpoint=tmp_path / "checkpoint.pt",
        pictures=2,
        save_every_s=0,
        log_every_s=0,
        seed=1,
    )
    train(args, Event())
    progress = load_model(args.checkpoint)[1]["progress"]
    assert progress["step"]
    args.minutes = progress["elapsed_s"] / 60 + 0.001
    train(args, Event())
    steps = load_model(args.checkpoint)[1]["progress"]["step"]
    assert steps > progress["step"]
    args.minutes, stopped = 1000, Event()
    stopped.set()
    train(args, stopped)
    assert load_model(args.checkpoint)[1]["progress"]["step"] == steps


def test_scores_of_answers() -> None:
    shapes = (DrawnShape("circle", "red", 0.25, 0.5, 0.5, 0.2),)
    found = {"x_min": 0.0, "y_min": 0.4, "x_max": 0.5, "y_max": 0.6}
    assert score(Question("detect", "detect", "circle", found=shapes), {"objects": [found]}) == pytest.approx([1])
    assert score(Question("point", "point", "circle", found=shapes), {"points": [{"x": 0.27, "y": 0.5}]}) == [1]
    assert score(Question("query", "count", "?", "3"), {"answer": "3"}) == [1]


def test_shapes_lie_apart_and_inside_and_in_order() -> None:
    for seed in range(50):
        scene = draw_scene(Random(seed), (140, 100))
        assert 1 <= len(scene.shapes) <= 4
        assert sorted(scene.shapes, key=lambda s: s.x) == list(scene.shapes)
        for shape in scene.shapes:
            assert 0 <= shape.x - shape.width / 2 <= shape.x + shape.width / 2 <= 1
            assert 0 <= shape.y - shape.height / 2 <= shape.y + shape.height / 2 <= 1
            assert not any(shape.overlaps(other) for other in scene.shapes if other is not shape)


def test_a_picture_has_the_colour_of_a_shape_at_its_centre() -> None:
    for seed in range(30):
        rng = Random(seed)
        scene = draw_scene(rng, (150, 110))
        picture = paint(scene, rng)
        for shape in scene.shapes:
            pixel = picture.getpixel((int(shape.x * 150), int(shape.y * 110)))
            assert isinstance(pixel, tuple)
            assert max(abs(a - b) for a, b in zip(pixel, COLORS[shape.color], strict=True)) <= 16


def test_a_near_miss_of_a_number_costs_less_than_a_far_one() -> None:
    (target,) = nearby(torch.tensor([500]), 1024)
    assert target.argmax() == 500
    assert target[500] > target[505] > target[520] > target[560]


def test_points_and_boxes_are_compared_in_order() -> None:
    shapes = [DrawnShape("circle", "red", 0.2, 0.5, 0.2, 0.2), DrawnShape("square", "red", 0.7, 0.5, 0.2, 0.2)]
    points, boxes = [(0.2, 0.5), (0.74, 0.5)], [(0.2, 0.5, 0.2, 0.2), (0.74, 0.5, 0.2, 0.1)]
    assert right_points(points, shapes)
    assert not right_points(points, shapes[:1])
    assert not right_points(points, shapes[::-1])
    assert overlaps(boxes, shapes) == pytest.approx([1.0, 0.016 / 0.044])
    assert overlaps(boxes, shapes[:1]) == pytest.approx([1.0, 0.0])
