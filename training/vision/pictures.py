"""Pictures of coloured shapes, and what can be asked about them.

A scene has one to four shapes that do not overlap, in the order of their centres from left to right: the order of
all answers. Each question has one right answer: a text, points, or boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

KINDS = ("circle", "square", "triangle")
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 30),
    "black": (20, 20, 20),
}
BACKGROUNDS = ((255, 255, 255), (230, 230, 230), (205, 225, 245), (245, 225, 205))
MOST = 4
SMALLEST, LARGEST = 0.16, 0.42
APART = 0.1
"""Least horizontal distance between two centres, as a share of the width: less, and a person would need a ruler
to say which of two shapes, one above the other, is further left."""


@dataclass(frozen=True)
class Shape:
    """Centre and size are fractions of the picture's width and height."""

    kind: str
    color: str
    x: float
    y: float
    width: float
    height: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"

    def overlaps(self, other: Shape) -> bool:
        gap = 0.02
        across = abs(self.x - other.x) < (self.width + other.width) / 2 + gap
        return across and abs(self.y - other.y) < (self.height + other.height) / 2 + gap


@dataclass(frozen=True)
class Scene:
    size: tuple[int, int]
    background: tuple[int, int, int]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Question:
    """One thing to ask. skill: query, caption, point or detect; text: the question, the caption's length, or the
    object; answer: a text; found: the shapes to point at or to put boxes around."""

    skill: str
    kind: str
    text: str
    answer: str = ""
    found: tuple[Shape, ...] = ()


def draw_scene(rng: Random, size: tuple[int, int]) -> Scene:
    """`size`: width and height in pixels."""
    width, height = size
    shapes: list[Shape] = []
    for _ in range(60):
        if len(shapes) == MOST or (shapes and rng.random() < 0.05):
            break
        pixels = rng.uniform(SMALLEST, LARGEST) * min(size)
        w, h = pixels / width, pixels / height
        x, y = rng.uniform(w / 2, 1 - w / 2), rng.uniform(h / 2, 1 - h / 2)
        shape = Shape(rng.choice(KINDS), rng.choice(list(COLORS)), x, y, w, h)
        if all(abs(shape.x - other.x) >= APART and not shape.overlaps(other) for other in shapes):
            shapes.append(shape)
    kept = shapes[: rng.randint(1, len(shapes))]
    return Scene(size, rng.choice(BACKGROUNDS), tuple(sorted(kept, key=lambda shape: shape.x)))


def paint(scene: Scene, rng: Random) -> Image.Image:
    """The picture, at twice its size and then reduced, so that edges are smooth. Colours vary a little."""
    width, height = scene.size
    picture = Image.new("RGB", (2 * width, 2 * height), scene.background)
    draw = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        near = tuple(min(255, max(0, c + rng.randint(-15, 15))) for c in COLORS[shape.color])
        left, right = (2 * width * (shape.x + side * shape.width / 2) for side in (-1, 1))
        top, bottom = (2 * height * (shape.y + side * shape.height / 2) for side in (-1, 1))
        if shape.kind == "circle":
            draw.ellipse((left, top, right, bottom), fill=near)
        elif shape.kind == "square":
            draw.rectangle((left, top, right, bottom), fill=near)
        else:
            draw.polygon(((left, bottom), ((left + right) / 2, top), (right, bottom)), fill=near)
    return picture.resize(scene.size, Image.Resampling.BOX)


def cells(scene: Scene, rows: int, columns: int) -> list[int]:
    """For each cell of a grid over the picture, row by row: the place of the shape that covers its centre, 1 for
    the leftmost; 0 for none."""
    found = []
    for row in range(rows):
        for column in range(columns):
            x, y = (column + 0.5) / columns, (row + 0.5) / rows
            over = [
                (place, s)
                for place, s in enumerate(scene.shapes, 1)
                if abs(s.x - x) <= s.width / 2 + 0.03 and abs(s.y - y) <= s.height / 2 + 0.03
            ]
            nearest = min(over, key=lambda of: (of[1].x - x) ** 2 + (of[1].y - y) ** 2, default=(0, None))
            found.append(nearest[0])
    return found


def number_of(shape: Shape) -> int:
    """The number of the shape's colour and kind, from 1."""
    return 1 + list(COLORS).index(shape.color) * len(KINDS) + KINDS.index(shape.kind)


def listed(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(f"a {shape.name}" for shape in shapes)


def counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def ask_caption(scene: Scene, rng: Random) -> Question:
    n = len(scene.shapes)
    texts = {
        "short": listed(scene.shapes),
        "normal": f"A picture of {counted(n, 'shape')}: {listed(scene.shapes)}.",
        "long": f"A picture of {counted(n, 'shape')}, from left to right: {listed(scene.shapes)}.",
    }
    length = rng.choice(list(texts))
    return Question("caption", "caption", length, texts[length])


def ask_count(scene: Scene, rng: Random) -> Question:
    what = rng.choice(["shape", *KINDS, *(f"{color} shape" for color in COLORS)])
    n = len(_matching(scene, what))
    return Question("query", "count", f"How many {what}s are there?", str(n))


def ask_color(scene: Scene, rng: Random) -> Question | None:
    unique = [s for s in scene.shapes if len(_matching(scene, s.kind)) == 1]
    if not unique:
        return None
    shape = rng.choice(unique)
    return Question("query", "color", f"What color is the {shape.kind}?", shape.color)


def ask_whether(scene: Scene, rng: Random) -> Question:
    what = _subject(scene, rng)
    return Question("query", "yes or no", f"Is there a {what}?", "yes" if _matching(scene, what) else "no")


def ask_point(scene: Scene, rng: Random) -> Question:
    what = _subject(scene, rng)
    return Question("point", "point", what, found=_matching(scene, what))


def ask_detect(scene: Scene, rng: Random) -> Question:
    what = _subject(scene, rng)
    return Question("detect", "detect", what, found=_matching(scene, what))


ASK: tuple[Callable[[Scene, Random], Question | None], ...] = (
    ask_caption,
    ask_count,
    ask_color,
    ask_whether,
    ask_point,
    ask_point,
    ask_detect,
    ask_detect,
)


def ask_all(scene: Scene, rng: Random) -> list[Question]:
    """One question of each kind, more of those with coordinates."""
    return [question for ask in ASK if (question := ask(scene, rng)) is not None]


def ask_pair(scenes: tuple[Scene, Scene], rng: Random) -> list[Question]:
    """What can be asked about two pictures at once."""
    first, second = (len(scene.shapes) for scene in scenes)
    more = "both have as many" if first == second else "the first" if first > second else "the second"
    found = [("Which image has more shapes?", more)]
    for which, scene in zip(("first", "second"), scenes, strict=True):
        what = _subject(rng.choice(scenes), rng)
        found.append((f"Is there a {what} in the {which} image?", "yes" if _matching(scene, what) else "no"))
        what = rng.choice(["shape", *KINDS, *(f"{color} shape" for color in COLORS)])
        found.append((f"How many {what}s are in the {which} image?", str(len(_matching(scene, what)))))
    return [Question("query", "two pictures", text, answer) for text, answer in found]


def _subject(scene: Scene, rng: Random) -> str:
    """A shape, a colour or both; mostly one that is there."""
    if rng.random() < 0.7:
        shape = rng.choice(scene.shapes)
        return rng.choice([shape.kind, shape.name, f"{shape.color} shape", "shape"])
    kind, color = rng.choice(KINDS), rng.choice(list(COLORS))
    return rng.choice([kind, f"{color} {kind}", f"{color} shape"])


def _matching(scene: Scene, what: str) -> tuple[Shape, ...]:
    color, _, kind = what.rpartition(" ")
    return tuple(s for s in scene.shapes if color in ("", s.color) and kind in ("shape", s.kind))
