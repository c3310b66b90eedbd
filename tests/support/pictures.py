"""Pictures of shapes, as files, and a small Moondream that has learnt some."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

MODEL = str(Path(__file__).parent / "small_moondream")
"""Moondream 2 made small, with 9 x 9 patches and at most 4 crops beside the whole picture. It was trained."""


def picture(seed: int = 0, size: tuple[int, int] = (130, 110), mode: str = "RGB") -> Image.Image:
    """A square and a circle; where, and their colours, follow from the seed."""
    made = Image.new("RGB", size, (255, 255, 255 - seed % 50))
    draw, (width, height) = ImageDraw.Draw(made), size
    at = seed * 7 % 40 / 100
    draw.rectangle((width * at, height * 0.1, width * (at + 0.25), height * 0.4), fill=(220, seed * 11 % 200, 40))
    draw.ellipse((width * 0.6, height * 0.5, width * 0.9, height * 0.9), fill=(40, 70, 220 - seed % 100))
    return made.convert(mode)


def file(seed: int = 0, kind: str = "PNG", size: tuple[int, int] = (130, 110), **options: Any) -> bytes:
    return saved(picture(seed, size), kind, **options)


def saved(made: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    made.save(buffer, kind, **options)
    return buffer.getvalue()
