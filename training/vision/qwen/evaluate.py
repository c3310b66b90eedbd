"""Figures on held-out pictures: `python -m training.vision.qwen.evaluate FOLDER --pictures 200`.

The engine serves the exported folder, and answers files by its skills, greedily: boxes and points match a schema,
as for every caller. What the figures are: see `training.vision.evaluate`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from training.vision.evaluate import overlaps, right_points
from training.vision.pictures import Question, Scene, ask_all, ask_pair, draw_scene, paint
from training.vision.qwen.tokens import call_of


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
        print(json.dumps(figures(engine, args.pictures, args.seed)))


if __name__ == "__main__":
    main()
