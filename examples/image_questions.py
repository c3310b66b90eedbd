"""Questions about a picture: `python examples/image_questions.py street.jpg car "How many cars are there?"`.

The picture is stored once, and each question names it: the worker decodes and encodes it for the first one alone.
Needs a worker of a vision model, such as `PETIOLE_MODEL=petiole-tiny-vision`, which knows circles, squares and
triangles.
"""

import json
import sys
from pathlib import Path

from celery import group

from petiole import caption, detect, point, put_image, query


def look(picture: bytes, thing: str, question: str) -> dict[str, object]:
    """All four questions run in one batch of the engine."""
    image = put_image(picture)
    asked = group(
        query.s(image=image, question=question, temperature=0),
        caption.s(image=image, length="short", temperature=0),
        point.s(image=image, object=thing),
        detect.s(image=image, object=thing),
    )
    answer, text, points, boxes = asked.apply_async().get(timeout=120)
    return {
        "answer": answer["answer"],
        "caption": text["caption"],
        "points": points["points"],  # shares of width and height, from the upper left corner
        "boxes": boxes["objects"],
    }


if __name__ == "__main__":
    path, thing, question = sys.argv[1:4]
    print(json.dumps(look(Path(path).read_bytes(), thing, question), indent=1))
