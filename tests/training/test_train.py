"""Training: batches put loss on answers alone, the optimizer orthogonalizes, a stopped run goes on."""

import argparse
from pathlib import Path
from random import Random

import pytest
import torch

from training.optimizer import orthogonal
from training.text.data import draw_batches
from training.text.skills import DRAWS
from training.text.tokenizer import IM_END_ID, build
from training.train import DECAY_SHARE, WARMUP_STEPS, Progress, learning_rate_factor, load_model, train

TOKENIZER = build()


def test_loss_lies_on_answers_and_their_end_alone() -> None:
    for batch in draw_batches(TOKENIZER, Random(1), dict.fromkeys(DRAWS, 1.0), 3000, 1000):
        for index, row in enumerate(batch.rows):
            learnt = {position + 1 for position in batch.weights[index].nonzero().flatten().tolist()}
            assert learnt == {at for _, start, end in row.answers for at in range(start, end)}
            assert all(row.tokens[end - 1] == IM_END_ID for _, _, end in row.answers)


def test_an_answer_weighs_the_square_root_of_its_length() -> None:
    for batch in draw_batches(TOKENIZER, Random(2), dict.fromkeys(DRAWS, 1.0), 3000, 1000):
        for weights, row in zip(batch.weights, batch.rows, strict=True):
            assert float(weights.sum()) == pytest.approx(sum((e - s) ** 0.5 for _, s, e in row.answers), rel=1e-4)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_an_orthogonal_update_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))))
    assert all(0.3 < value < 1.4 for value in values.flatten().tolist())


def test_learning_rate_warms_up_holds_and_falls_to_zero() -> None:
    assert learning_rate_factor(0, 0.0) == 1 / WARMUP_STEPS
    assert learning_rate_factor(WARMUP_STEPS, 0.1) == learning_rate_factor(999, 1 - DECAY_SHARE) == 1.0
    assert learning_rate_factor(999, 1 - DECAY_SHARE / 2) == pytest.approx(0.5)
    assert learning_rate_factor(999, 1.0) == 0.0


def test_what_is_learnt_is_drawn_less_but_never_dropped() -> None:
    progress = Progress()
    for _ in range(2000):
        progress.saw("spelling", True, 10)
        progress.saw("addition", False, 10)
    shares = progress.shares()
    assert 0 < shares["spelling"] < shares["addition"] / 5


def test_a_stopped_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    args = argparse.Namespace(
        minutes=0.005,
        threads=1,
        checkpoint=tmp_path / "checkpoint.pt",
        step_tokens=200,
        batch_tokens=200,
        save_every_s=60.0,
        log_every_s=60.0,
        seed=1,
    )
    train(args)
    _, first = load_model(args.checkpoint)
    args.minutes += first["progress"]["elapsed_s"] / 60
    train(args)
    _, second = load_model(args.checkpoint)
    assert second["progress"]["step"] > first["progress"]["step"] > 0
    assert second["progress"]["elapsed_s"] >= args.minutes * 60
