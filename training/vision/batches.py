"""Pictures with rows of questions, drawn anew for every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from petiole.gpu_worker.models.vision.pictures import GridPictures
from petiole.gpu_worker.request.prepared_images import RequestImage, rotary_positions
from training.vision.losses import Covered
from training.vision.model import Asked, TowerShape
from training.vision.pictures import Question, Scene, ask_all, ask_count, ask_pair, draw_scene, paint
from training.vision.tokens import FIRST_NUMBER, IMAGE, Row, prefix_of, row_of

LEAST, MOST_PIXELS = 36_864, 43_008
"""Pixels of a resized picture: 36 to 42 positions."""
LARGE_SHARE, PAIR_SHARE = 0.15, 0.2
"""The shares of steps with larger pictures, and with questions about two pictures."""
SKIPPED = {"color": 0.6, "yes or no": 0.5}
"""The share of questions that are left out, of the kinds that are learnt soonest."""
SHORT = 24
"""Tokens of a row: longer ones are a group of their own, so that few tokens are padding."""


@dataclass(frozen=True)
class Group:
    """Rows of alike lengths. learnt: bool [M, L], the tokens to predict; near: bool [M, L], those of them of which
    a near number is nearly right; kinds: of the questions."""

    asked: Asked
    learnt: Tensor
    near: Tensor
    kinds: list[str]


@dataclass(frozen=True)
class Batch:
    """pixels: uint8 [N, height, width, 3]; covered: what covers them; each: how many of them stand in a prefix;
    prefix, positions, places: see `SmallQwen.hidden`."""

    pixels: Tensor
    covered: Covered
    each: int
    prefix: Tensor
    positions: Tensor
    places: Tensor
    groups: list[Group]


def pictures_of(shape: TowerShape) -> GridPictures:
    half = (0.5, 0.5, 0.5)
    return GridPictures(shape.patch_size, shape.spatial_merge_size, half, half, least=LEAST, most=MOST_PIXELS)


def picture_size(rng: Random) -> tuple[int, int]:
    if rng.random() < LARGE_SHARE:
        return rng.randint(150, 260), rng.randint(150, 260)
    return rng.randint(95, 189), rng.randint(95, 126)


def draw_batch(tokenizer: Tokenizer, rng: Random, shape: TowerShape, n: int, *, asks: bool) -> Batch:
    """A batch of even seeds: the odd ones are held out. Of two scenes the batch has the one with more shapes,
    which teaches more. asks: whether there are questions."""
    size, each = picture_size(rng), 2 if asks and rng.random() < PAIR_SHARE else 1
    owns = [Random(2 * rng.getrandbits(60)) for _ in range(n)]
    scenes = [max((draw_scene(own, size) for _ in range(2)), key=lambda scene: len(scene.shapes)) for own in owns]
    questions: list[list[Question]] = []
    if asks and each == 2:
        questions = [ask_pair((scenes[k], scenes[k + 1]), owns[k]) for k in range(0, n, 2)]
    elif asks:
        questions = [
            [q for q in (*ask_all(scene, own), ask_count(scene, own)) if own.random() > SKIPPED.get(q.kind, 0)]
            for scene, own in zip(scenes, owns, strict=True)
        ]
    return batch_of(tokenizer, shape, scenes, owns, each, questions)


def batch_of(
    tokenizer: Tokenizer,
    shape: TowerShape,
    scenes: Sequence[Scene],
    owns: Sequence[Random],
    each: int,
    questions: Sequence[Sequence[Question]],
) -> Batch:
    """owns: what each scene is painted with. questions: by prefix, each of `each` pictures."""
    pictures = pictures_of(shape)
    layout = pictures.layout(*scenes[0].size, "image", 4096)
    assert layout.size is not None
    painted = (
        pictures.prepared(paint(scene, own), 0, layout).pixels[0] for scene, own in zip(scenes, owns, strict=True)
    )
    pixels = torch.stack([torch.from_numpy(one) for one in painted])
    prefix = torch.tensor(prefix_of(tokenizer, [layout.n_positions] * each))
    places = (prefix == IMAGE).nonzero().flatten()
    starts = places[:: layout.n_positions].tolist()
    image = RequestImage(0, layout.n_positions, layout.rotary)
    positions = rotary_positions(len(prefix), dict.fromkeys(starts, image))
    columns, rows = (side // pictures.side for side in layout.size)
    return Batch(
        pixels,
        Covered.of(scenes, rows, columns),
        each,
        prefix,
        torch.from_numpy(positions).long(),
        places,
        grouped(tokenizer, questions),
    )


def grouped(tokenizer: Tokenizer, questions: Sequence[Sequence[Question]]) -> list[Group]:
    rows = [(row_of(tokenizer, one), owner, one.kind) for owner, own in enumerate(questions) for one in own]
    short = [row for row in rows if len(row[0].tokens) <= SHORT]
    long = [row for row in rows if len(row[0].tokens) > SHORT]
    return [_group(own) for own in (short, long) if own]


def _group(rows: Sequence[tuple[Row, int, str]]) -> Group:
    length = max(len(row.tokens) for row, _, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    learnt, near = (torch.zeros(len(rows), length, dtype=torch.bool) for _ in range(2))
    for i, (row, _, _) in enumerate(rows):
        tokens[i, : len(row.tokens)] = torch.tensor(row.tokens)
        learnt[i, row.start : len(row.tokens)] = True
        near[i] = learnt[i] & (tokens[i] >= FIRST_NUMBER) & row.near
    owner = torch.tensor([owner for _, owner, _ in rows])
    return Group(Asked(tokens, owner), learnt, near, [kind for _, _, kind in rows])
