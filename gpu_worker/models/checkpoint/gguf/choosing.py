"""Which GGUF file of a folder, or of a repository on the hub, is meant, and of which pieces it consists.

llama.cpp's names end in the type, and in which piece a file is: `model-Q4_K_M.gguf`,
`model-Q4_K_M-00001-of-00003.gguf`. So the end of a name tells a model from the others beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from petiole.gpu_worker.exceptions import ModelError

_NAMED = re.compile(r"(?s)(.+):([\w.-]+)")
_PIECE = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_BESIDE = re.compile(r"(.*[-._/])?(mmproj|imatrix)([-._].*)?", re.IGNORECASE)
"""Files of a vision tower, and of a quantiser's measurements."""


def parted(model: str) -> tuple[str, str]:
    """`folder:Q4_K_M` -> the folder, and the end of a file's name; "" if there is none."""
    found = _NAMED.fullmatch(model)
    return (found[1], found[2]) if found else (model, "")


def in_folder(folder: Path, wanted: str = "") -> Path | None:
    """The file of a folder whose name ends in `wanted`; without it, the only one. None: there are no such files.
    Raises ModelError if there is another number of them."""
    sizes = {str(path.relative_to(folder)): path for path in [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]}
    names = choose(f"model folder {folder}", {name: path.stat().st_size for name, path in sizes.items()}, wanted)
    return folder / names[0] if names else None


def choose(where: str, sizes: Mapping[str, int], wanted: str = "") -> list[str]:
    """The names of the one model's files, the first piece first; none if there is no model. where: before the
    message of an error. sizes: bytes by name."""
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        piece = _PIECE.fullmatch(name)
        stem = piece[1] if piece else name.removesuffix(".gguf")
        if name.endswith(".gguf") and not _BESIDE.fullmatch(stem):
            models.setdefault(stem, []).append(name)
    end = re.compile(rf"(.*[-._/])?{re.escape(wanted.removesuffix('.gguf'))}", re.IGNORECASE)
    found = [stem for stem in models if not wanted or end.fullmatch(stem)]
    if len(found) == 1:
        return models[found[0]]
    if not models and not wanted:
        return []
    listed = ", ".join(f"{stem} ({_shown(sum(sizes[name] for name in models[stem]))})" for stem in models)
    if not models:
        raise ModelError(f"{where} has no GGUF file, so none whose name ends in {wanted}")
    wish = f"{len(found)} models whose names end in {wanted}" if wanted else f"{len(found)} models"
    raise ModelError(f"{where} has {wish}: PETIOLE_MODEL must name one with a colon, as PLACE:Q8_0, of {listed}")


def _shown(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def pieces_of(path: Path) -> list[Path]:
    """All the files of the model of which this file is a piece, in order. Raises ModelError if one is missing."""
    piece = _PIECE.fullmatch(path.name)
    if piece is None:
        return [path]
    n, found = int(piece[3]), list[Path]()
    for i in range(1, n + 1):
        found.append(path.with_name(f"{piece[1]}-{i:05}-of-{n:05}.gguf"))
        if not found[-1].is_file():
            raise ModelError(f"{path} is one of {n} pieces: {found[-1]} is missing")
    if path not in found:
        raise ModelError(f"{path} must be one of {n} pieces, got number {int(piece[2])}")
    return found
