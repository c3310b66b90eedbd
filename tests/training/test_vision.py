"""The training of the model that sees: pictures and their answers, packed questions, a run that goes on."""

import argparse
from pathlib import Path
from random import Random
from threading import Event

import pytest
import torch

from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.models.moondream.crops import cropped
from training.vision import tokens as tokens_
from training.vision.evaluate import GEOMETRY, Answer, ask, overlaps, right_points
from training.vision.export import export
from training.vision.losses import nearby
from training.vision.model import Moondream, RegionShape, Shape, TextShape, VisionShape
from training.vision.pictures import COLORS, Shape as Shape2, ask_all, draw_scene, paint
from training.vision.tokens import COORDINATE, EOS, SIZE, Row, row_of
from training.vision.train import batch_of, draw_batch, hidden_of, load_model, train

TOKENIZER = tokens_.build()
TINY = Shape(VisionShape(16, 2, 1, 16), TextShape(64, 1, 2, 32), RegionShape(4, 4, 8))


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


def test_answers_round_trip_through_the_tokenizer_and_bins_say_where_the_shapes_are() -> None:
    for seed in range(30):
        rng = Random(seed)
        for question in ask_all(draw_scene(rng, (150, 110)), rng):
            row = row_of(TOKENIZER, question)
            answer = row.tokens[row.start :]
            assert answer[-1] == EOS
            if question.skill in ("caption", "query"):
                assert TOKENIZER.decode(answer, skip_special_tokens=True) == question.answer
                continue
            step = 2 if question.skill == "point" else 3
            assert len(answer) == step * len(question.found) + 1
            for k, shape in enumerate(question.found):
                at = row.start + step * k
                assert row.tokens[at : at + 2] == [COORDINATE] * 2
                assert row.bins[at][0] / 1024 == pytest.approx(shape.x, abs=1e-3)
                if step == 3:
                    assert row.tokens[at + 2] == SIZE
                    sizes = [2 ** (10 * one / 1023 - 10) for one in row.bins[at + 2]]
                    assert sizes == pytest.approx([shape.width, shape.height], rel=0.01)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_question_in_a_row_of_questions_is_computed_as_if_alone(seed: int) -> None:
    torch.manual_seed(seed)
    model = Moondream(TINY)
    torch.nn.init.normal_(model.model["text"]["blocks"][1]["attn"]["proj"].weight)
    rng = Random(seed)
    questions = ask_all(draw_scene(rng, (126, 126)), rng)
    rows = [row_of(TOKENIZER, question) for question in questions]
    pixels = torch.randint(0, 256, (1, 2, 126, 126, 3), dtype=torch.uint8)
    kinds = [[question.kind for question in questions]]
    prefix = 1 + TINY.vision.grid**2
    images = model.images(pixels, (1, 1))
    together = hidden_of(model, batch_of(pixels, (1, 1), [rows], kinds, prefix), images)[1][0]
    at = 0
    for row in rows:
        alone = hidden_of(model, batch_of(pixels, (1, 1), [[row]], kinds, prefix), images)[1][0]
        assert torch.allclose(together[at : at + len(row.tokens)], alone, atol=1e-4)
        at += len(row.tokens)


def test_what_is_learnt_are_answers_alone() -> None:
    batch = draw_batch(TOKENIZER, Random(5), TINY, 3)
    assert batch.learnt.any()
    assert not (batch.learnt & (batch.question == 0)).any()
    after_answer = batch.tokens[:, :-1][batch.learnt[:, 1:] & ~batch.learnt[:, :-1]]
    assert set(after_answer.tolist()) == {3}


def test_a_near_miss_of_a_bin_costs_less_than_a_far_one() -> None:
    (target,) = nearby(torch.tensor([500]), 1024)
    assert target.argmax() == 500
    assert target[500] > target[505] > target[520] > target[560]


def test_a_stopped_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    args = argparse.Namespace(
        minutes=0.001,
        threads=1,
        checkpoint=tmp_path / "checkpoint.pt",
        start=None,
        pictures=1,
        save_every_s=0,
        log_every_s=1000,
        seed=1,
    )
    train(args, Event())
    model, state = load_model(args.checkpoint)
    steps = state["progress"]["step"]
    assert steps
    published = ("model.vision.", "model.text.", "model.region.")
    assert all(name.startswith((*published, "cells.", "places.")) for name in model.state_dict())
    args.minutes = state["progress"]["elapsed_s"] / 60 + 0.001
    train(args, Event())
    steps_then = load_model(args.checkpoint)[1]["progress"]["step"]
    assert steps_then > steps
    args.minutes, stopped = 1000, Event()
    stopped.set()
    train(args, stopped)
    assert load_model(args.checkpoint)[1]["progress"]["step"] == steps_then


def test_an_exported_model_answers_in_the_engine_as_in_training(tmp_path: Path) -> None:
    """Tokens and bins, greedily: the same names, dimensions, crops, tables and positions."""
    torch.manual_seed(7)
    model = Moondream(TINY)
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "blocks" in name:
            torch.nn.init.normal_(weight, std=0.2)
        with torch.no_grad():
            weight.copy_(weight.to(torch.bfloat16))
    export(model, tmp_path)
    rng = Random(3)
    scene = draw_scene(rng, (190, 180))
    crops = cropped(paint(scene, rng), GEOMETRY)
    assert crops.tiling == (2, 2)
    questions = ask_all(scene, rng)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=4, num_pages=2000)
    with Engine(config) as engine, torch.no_grad():
        for question, answer in zip(questions, ask(engine, TOKENIZER, crops, 1, questions), strict=True):
            row = row_of(TOKENIZER, question)
            tokens, bins = row.tokens[: row.start], row.bins[: row.start]
            for token, values in list(zip(answer.token_ids, answer.values, strict=True))[:12]:
                pixels = torch.from_numpy(crops.pixels)[None]
                one = batch_of(pixels, crops.tiling, [[Row(tokens, bins, len(tokens))]], [["x"]], 82)
                last = hidden_of(model, one, model.images(pixels, crops.tiling))[1][:, -1]
                assert token == int(model.logits(last).argmax())
                own = (-1, -1)
                if token == COORDINATE:
                    own = (int(model.coordinate_logits(last).argmax()), -1)
                    assert values == (own[0] / 1024,)
                elif token == SIZE:
                    width, height = model.size_logits(last)[0].argmax(-1).tolist()
                    own = (width, height)
                    assert values == pytest.approx([2 ** (10 * side / 1023 - 10) for side in own])
                tokens, bins = [*tokens, token], [*bins, own]


def test_points_and_boxes_are_compared_in_order() -> None:
    shapes = [Shape2("circle", "red", 0.2, 0.5, 0.2, 0.2), Shape2("square", "red", 0.7, 0.5, 0.2, 0.2)]
    numbers = [(0.2,), (0.5,), (0.2, 0.2), (0.74,), (0.5,), (0.2, 0.1)]
    answer = Answer([5, 5, 6, 5, 5, 6], numbers)
    assert right_points(answer.points(), shapes)
    assert not right_points(answer.points(), shapes[:1])
    assert not right_points(answer.points(), shapes[::-1])
    assert overlaps(answer.boxes(), shapes) == pytest.approx([1.0, 0.016 / 0.044])
    assert overlaps(answer.boxes(), shapes[:1]) == pytest.approx([1.0, 0.0])
