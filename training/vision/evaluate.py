"""Figures on held-out pictures: `python -m training.vision.evaluate FOLDER --pictures 200 --card`.

The engine serves the exported folder and answers greedily, with nothing that steers its tokens. Exact answers are
the shares of texts that are right to the letter; points count if all of them are found, in order, within 0.05;
boxes by their mean intersection over union, 0 for one that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from petiole.gpu_worker import Delta, Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint
from petiole.gpu_worker.models.moondream.crops import CropGeometry, Crops, cropped
from petiole.gpu_worker.request.prepared_images import ImagePlace, PreparedImage
from training.vision import tokens
from training.vision.card import card
from training.vision.pictures import Question, Shape, ask_all, draw_scene, paint
from training.vision.tokens import COORDINATE, EOS, SIZE, row_of

GEOMETRY = CropGeometry(patch=14, grid=9, margin=2, max_crops=4)
NEAR = 0.05
Values = tuple[float, ...]
Box = tuple[float, float, float, float]
"""Centre, width and height."""


@dataclass(frozen=True)
class Answer:
    """token_ids, and the values decoded with each."""

    token_ids: Sequence[int]
    values: Sequence[Values]

    def points(self) -> list[tuple[float, float]]:
        """Every two coordinates in a row."""
        numbers = [value for of in self.values if len(of) == 1 for value in of]
        return list(zip(numbers[::2], numbers[1::2], strict=False))

    def boxes(self) -> list[Box]:
        sizes = [of for token, of in zip(self.token_ids, self.values, strict=True) if token == SIZE]
        return [(*at, *size) for at, size in zip(self.points(), sizes, strict=False)]  # type: ignore[misc]


def right_points(found: Sequence[tuple[float, float]], shapes: Sequence[Shape]) -> bool:
    return len(found) == len(shapes) and all(
        abs(x - shape.x) <= NEAR and abs(y - shape.y) <= NEAR for (x, y), shape in zip(found, shapes, strict=True)
    )


def overlap(box: Box, shape: Shape) -> float:
    """Intersection over union."""
    x, y, width, height = box
    wide = min(x + width / 2, shape.x + shape.width / 2) - max(x - width / 2, shape.x - shape.width / 2)
    high = min(y + height / 2, shape.y + shape.height / 2) - max(y - height / 2, shape.y - shape.height / 2)
    both = max(0.0, wide) * max(0.0, high)
    return both / (width * height + shape.width * shape.height - both)


def overlaps(boxes: Sequence[Box], shapes: Sequence[Shape]) -> list[float]:
    """The overlap of each shape with the box in its place; 0 for a missing one and for one too many."""
    return [
        overlap(boxes[k], shapes[k]) if k < min(len(boxes), len(shapes)) else 0.0
        for k in range(max(len(boxes), len(shapes)))
    ]


def ask(
    engine: Engine, tokenizer: Tokenizer, crops: Crops, name: int, questions: Sequence[Question]
) -> list[Answer]:
    """`name`: a number that only this picture has."""
    image = PreparedImage(name, GEOMETRY.grid**2, crops.pixels, crops.tiling)
    asked = []
    for question in questions:
        row = row_of(tokenizer, question)
        prompt = [EOS, ImagePlace(0), *row.tokens[: row.start]]
        sampling = SamplingParams(max_tokens=60, temperature=0.0)
        values: list[Values] = []
        request = Request(prompt=prompt, images=[image], sampling=sampling)

        def keep(_: object, delta: Delta, values: list[Values] = values) -> None:
            values.extend(delta.values or ())

        asked.append((engine.submit(request, on_delta=keep), values))
    return [Answer(handle.result().token_ids, values) for handle, values in asked]


def figures(engine: Engine, n_pictures: int, seed: int) -> dict[str, Any]:
    tokenizer, rng = tokens.build(), Random(seed)
    right: dict[str, list[float]] = defaultdict(list)
    for number in range(n_pictures):
        own = Random(2 * rng.getrandbits(60) + 1)  # training draws even seeds
        sides = (130, 110) if number % 6 else (180, 180)
        scene = draw_scene(own, sides)
        crops = cropped(paint(scene, own), GEOMETRY)
        questions = ask_all(scene, own)
        for question, answer in zip(questions, ask(engine, tokenizer, crops, number, questions), strict=True):
            if question.skill == "point":
                right["point"].append(float(right_points(answer.points(), question.found)))
            elif question.skill == "detect":
                right["detect"] += overlaps(answer.boxes(), question.found)
            else:
                text = tokenizer.decode([t for t in answer.token_ids if t not in (EOS, COORDINATE, SIZE)])
                right[question.kind].append(float(text == question.answer))
    return {kind: [round(sum(of) / len(of), 4), len(of)] for kind, of in sorted(right.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", action="store_true", help="write the model card, README.md in the folder")
    args = parser.parse_args()
    config = EngineConfig(
        model=str(args.folder),
        device="cpu",
        dtype="float32",
        max_num_seqs=8,
        num_threads=args.threads,
        num_pages=4000,
    )
    with Engine(config) as engine:
        found = figures(engine, args.pictures, args.seed)
    print(json.dumps(found))
    if args.card:
        with Checkpoint(args.folder) as weights:
            parameters = sum(math.prod(weights.entry(name).shape) for name in weights.names())
        (args.folder / "README.md").write_text(card(found, parameters))


if __name__ == "__main__":
    main()
