"""The model card of `petiole-tiny-vision`, from the figures that `training.vision.evaluate` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from training.vision.batches import LEAST, MOST_PIXELS
from training.vision.pictures import APART, SMALLEST
from training.vision.tokens import CONTEXT

BLOCK = 32
"""Pixels of a position's side."""

TARGETS = {
    "caption": (0.95, "caption", "texts right to the letter"),
    "count": (0.95, "query", "texts right to the letter"),
    "color": (0.95, "query", "texts right to the letter"),
    "yes or no": (0.95, "query", "texts right to the letter"),
    "two pictures": (0.90, "query", "texts right to the letter, of questions about two pictures at once"),
    "point": (0.95, "point", "answers with all points, in order, within 0.05"),
    "detect": (0.70, "detect", "mean intersection over union of boxes, 0 for a missing one and one too many"),
}
"""By kind of question: what was aimed at, by which skill it is asked, what the figure is."""

CARD = """---
license: apache-2.0
pipeline_tag: image-text-to-text
language: en
---

# petiole-tiny-vision

The vision model that ships with Petiole: for the demo, the tests and the first hour, on any computer. It has the
architecture of Qwen3-VL, made small: {parameters:.1f} million parameters, a tower with one deep layer, {least} to
{most} positions of a picture, bfloat16 weights, a context of {context:,} tokens.

It knows pictures of one to four coloured shapes (circles, squares and triangles; red, green, blue, yellow, black)
on a plain light background, and what `training/vision/pictures.py` asks about them. It knows nothing else, and has
not learnt to reason. The shapes do not overlap. Each is at least {smallest:.0%} of the shorter side. From
left to right, their centres are at least {apart:.0%} of the width apart, so that a person sees their order.

## Asking it

By the skills `query`, `caption`, `point` and `detect`, as docs/vision.md shows: `How many shapes are there?`,
`How many red shapes are there?`, `What color is the circle?`, `Is there a blue triangle?`; a caption, short or
normal or long; points and boxes of a `circle`, a `red shape`, a `red circle` or every `shape`, from left to right.
In a conversation, about two pictures: `Which image has more shapes?`, `How many circles are in the first image?`,
`Is there a blue triangle in the second image?`. It has learnt one turn, in these words.

## How well

On held-out pictures, drawn with seeds that training never uses, greedily and in float32, by the engine:

| question | skill | figure | of | | aimed at | |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

## How it was made

By `python -m training.vision.train` on pictures that the script draws; `python -m training.vision.export` writes
the folder, and `python -m training.vision.evaluate FOLDER --card` this page.
"""


def card(figures: Mapping[str, Sequence[float]], parameters: int) -> str:
    """`figures`: by kind of question, the figure and of how many."""
    rows = []
    for kind, (target, skill, what) in TARGETS.items():
        figure, number = figures[kind]
        met = "met" if figure >= target else "missed"
        rows.append(f"| {kind} | `{skill}` | {figure:.3f} | {number:.0f} | {what} | {target:.2f} | {met} |")
    return CARD.format(
        parameters=parameters / 1e6,
        least=LEAST // BLOCK**2,
        most=MOST_PIXELS // BLOCK**2,
        context=CONTEXT,
        smallest=SMALLEST,
        apart=APART,
        rows="\n".join(rows),
    )
