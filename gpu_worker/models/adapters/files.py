"""Which adapters requests may name, and the files of one. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def is_below(name: str, places: Sequence[str]) -> bool:
    """Whether the folder or hub id is one of these places or below one, also behind all symbolic links."""
    if "\0" in name or ".." in name.split("/"):
        return False
    place = next((place for place in places if f"{name}/".startswith(f"{place}/")), None)
    if place is None or not place.startswith("/"):
        return place is not None
    inside = os.path.join(os.path.realpath(place), "")
    return all(os.path.realpath(os.path.join(name, file)).startswith(inside) for file in ADAPTER_FILES)
