"""`petiole demo --vision`: draws a picture of coloured shapes, asks about it, and saves it with the answers drawn
in.

The picture is stored once, and all tasks name its handle. The small vision model may be wrong, so each answer is
shown beside the truth, and the end says how many are right.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from petiole.tasks.commands.demos.demo import DELTA_TIMEOUT_S, running
from petiole.tasks.commands.terminal import print_table
from petiole.tasks.submission.definitions import caption, detect, point, query
from petiole.tasks.submission.put_image import put_image

WIDTH, HEIGHT = 130, 110
ENLARGED = 5
"""By how much the saved picture is larger than the one that the model sees."""

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 30),
    "black": (20, 20, 20),
}
KINDS = ("circle", "square", "triangle")


@dataclass(frozen=True)
class DrawnShape:
    """Centre and side in pixels."""

    kind: str
    color: str
    x: int
    y: int
    side: int

    @property
    def corners(self) -> tuple[float, float, float, float]:
        half = self.side / 2
        return self.x - half, self.y - half, self.x + half, self.y + half


def shapes_of(seed: int) -> list[DrawnShape]:
    """Three shapes side by side, of different kinds and colours."""
    rng = random.Random(seed)
    kinds, colors = rng.sample(KINDS, 3), rng.sample(list(COLORS), 3)
    return [
        DrawnShape(
            kind, color, 25 + 40 * k + rng.randint(-3, 3), rng.randint(25, HEIGHT - 25), rng.randint(22, 34)
        )
        for k, (kind, color) in enumerate(zip(kinds, colors, strict=True))
    ]


def painted(shapes: list[DrawnShape]) -> Image.Image:
    """The picture, drawn at twice its size and then reduced, so that edges are smooth."""
    picture = Image.new("RGB", (2 * WIDTH, 2 * HEIGHT), (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    for shape in shapes:
        left, top, right, bottom = (2 * edge for edge in shape.corners)
        color = COLORS[shape.color]
        if shape.kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=color)
        elif shape.kind == "square":
            draw.rectangle((left, top, right, bottom), fill=color)
        else:
            draw.polygon(((left, bottom), ((left + right) / 2, top), (right, bottom)), fill=color)
    return picture.resize((WIDTH, HEIGHT), Image.Resampling.BOX)


def annotated(picture: Image.Image, points: list[Any], boxes: list[Any]) -> Image.Image:
    width, height = WIDTH * ENLARGED, HEIGHT * ENLARGED
    large = picture.resize((width, height), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(large)
    for box in boxes:
        corners = (box["x_min"] * width, box["y_min"] * height, box["x_max"] * width, box["y_max"] * height)
        draw.rectangle(corners, outline=(230, 0, 230), width=3)
    for one in points:
        x, y = one["x"] * width, one["y"] * height
        draw.line((x - 10, y, x + 10, y), fill=(255, 140, 0), width=4)
        draw.line((x, y - 10, x, y + 10), fill=(255, 140, 0), width=4)
    return large


def main(path: Path, seed: int | None = None) -> int:
    """Returns 0 if every task has an answer."""
    with running("petiole-tiny-vision"):
        return ask(path, shapes_of(int(time.time()) if seed is None else seed))


def ask(path: Path, shapes: list[DrawnShape]) -> int:
    picture, buffer = painted(shapes), BytesIO()
    picture.save(buffer, "PNG")
    image = put_image(buffer.getvalue())
    first = shapes[0]
    listed = ", ".join(f"a {shape.color} {shape.kind}" for shape in shapes)
    asked = [
        ("How many shapes are there?", str(len(shapes)), query, {"question": "How many shapes are there?"}),
        (
            f"What color is the {first.kind}?",
            first.color,
            query,
            {"question": f"What color is the {first.kind}?"},
        ),
        ("caption, short", listed, caption, {"length": "short"}),
        ("point: shape", f"{len(shapes)} points", point, {"object": "shape"}),
        ("detect: shape", f"{len(shapes)} boxes", detect, {"object": "shape"}),
    ]
    submitted = [
        task.delay(image=image, **options, **({"temperature": 0} if task in (query, caption) else {}))
        for _, _, task, options in asked
    ]
    results: list[Any] = [result.get(timeout=DELTA_TIMEOUT_S) for result in submitted]
    rows = [
        (what, shown(result), true, str(result["usage"]["cached_prompt_tokens"]))
        for (what, true, _, _), result in zip(asked, results, strict=True)
    ]
    print_table(("asked", "answered", "true", "cached tokens"), rows)
    points = next(result["points"] for result in results if "points" in result)
    boxes = next(result["objects"] for result in results if "objects" in result)
    annotated(picture, points, boxes).save(path)
    print(f"\n{path}: the picture, with points (crosses) and boxes drawn in.")
    right = sum(is_right(answered, true) for _, answered, true, _ in rows)
    small = ": petiole-tiny-vision is very small. docs/vision.md says more" if right < len(rows) else ""
    print(f"{right} of {len(rows)} answers are right{small}.")
    return 0


def is_right(answered: str, true: str) -> bool:
    """Whether the answer has each of the words, or of the shapes, that are true, in any order."""
    parts = (re.escape(part.removeprefix("a ")) for part in true.split(", "))
    return all(re.search(rf"\b{part}\b", answered.lower()) for part in parts)


def shown(result: dict[str, Any]) -> str:
    if "points" in result:
        return f"{len(result['points'])} points"
    if "objects" in result:
        return f"{len(result['objects'])} boxes"
    return str(result.get("answer", result.get("caption")))
