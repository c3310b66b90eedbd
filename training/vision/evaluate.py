"""Figures on held-out pictures: `python -m training.vision.evaluate FOLDER --pictures 200 --card`.

The engine serves the exported folder, and answers files by its skills, greedily: boxes and points match a schema,
as for every caller. Exact answers are the shares of texts that are right to the letter; points count if all of
them are found, in order, within 0.05; boxes by their mean intersection over union, 0 for one that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint
from training.vision.card import card
from training.vision.pictures import Question, Scene, Shape, ask_all, ask_pair, draw_scene, paint
from training.vision.tokens import call_of

NEAR = 0.05
Box = tuple[float, float, float, float]
"""Centre, width and height."""


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


def file_of(scene: Scene, rng: Random) -> bytes:
    file = BytesIO()
    paint(scene, rng).save(file, "PNG")
    return file.getvalue()


def ask(engine: Engine, files: Sequence[bytes], questions: Sequence[Question]) -> list[Any]:
    """The answers, as the skills give them."""
    sampling = SamplingParams(max_tokens=80, temperature=0.0)
    asked = [Request(skill=call_of(one), images=files, sampling=sampling) for one in questions]
    return [result.answer for result in engine.generate(asked)]


def score(question: Question, answer: Any) -> list[float]:
    if question.skill == "point":
        return [float(right_points([(one["x"], one["y"]) for one in answer["points"]], question.found))]
    if question.skill == "detect":
        corners = [(one["x_min"], one["y_min"], one["x_max"], one["y_max"]) for one in answer["objects"]]
        boxes = [((a + c) / 2, (b + d) / 2, c - a, d - b) for a, b, c, d in corners]
        return overlaps([(*box[:2], *(max(side, 1e-6) for side in box[2:])) for box in boxes], question.found)  # type: ignore[misc]
    return [float(answer[{"query": "answer"}.get(question.skill, "caption")] == question.answer)]


def figures(engine: Engine, n_pictures: int, seed: int) -> dict[str, list[float]]:
    """By kind of question, the mean and of how many."""
    rng, right = Random(seed), defaultdict[str, list[float]](list)
    for number in range(n_pictures):
        owns = [Random(2 * rng.getrandbits(60) + 1) for _ in range(2)]  # training draws even seeds
        scenes = [draw_scene(own, (130, 110) if number % 6 else (180, 180)) for own in owns]
        files = [file_of(scene, own) for scene, own in zip(scenes, owns, strict=True)]
        for shown, questions in (
            (files[:1], ask_all(scenes[0], owns[0])),
            (files, ask_pair((scenes[0], scenes[1]), owns[0])),
        ):
            for question, answer in zip(questions, ask(engine, shown, questions), strict=True):
                right[question.kind] += score(question, answer)
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
