"""The options of a skill call, checked: each error names the option, its limit and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest, require

MOST_OBJECTS = 1000


def check_names(skill: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in options.items():
        require(name in known, name, f"is not an option of {skill}", value)


def text(options: Mapping[str, Any], name: str) -> str:
    """A text that is not empty."""
    value = options.get(name)
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(name, "must be text that is not empty", value)
    return value


def max_objects(options: Mapping[str, Any]) -> int:
    value = options.get("max_objects", 50)
    good = type(value) is int and 1 <= value <= MOST_OBJECTS
    require(good, "max_objects", f"must be a whole number from 1 to {MOST_OBJECTS}", value)
    return int(value)


def needs_image(skill: str, n_images: int) -> None:
    require(n_images == 1, "image", f"{skill} takes one image", f"{n_images} images")
