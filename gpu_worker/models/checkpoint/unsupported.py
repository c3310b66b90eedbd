"""Recognises checkpoints in formats that are not read. The refusal names the format, and what to use instead."""

from __future__ import annotations

from pathlib import Path

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.gguf import choosing

_LFS = b"version https://git-lfs.github.com/spec/"
_PLAIN = "a folder in Hugging Face format with safetensors weights, a GGUF file, or a hub id"


def readable_file(path: Path) -> Path:
    """A GGUF file, or the first piece of one. Raises `ModelError` for other files."""
    if path.suffix == ".gguf":
        return choosing.pieces_of(path)[0]
    raise ModelError(f"model {path} is a file: PETIOLE_MODEL must be {_PLAIN}")


def readable(folder: Path, wanted: str = "") -> Path:
    """The folder, or the GGUF file in it whose name ends in `wanted`. Raises `ModelError` if the folder's
    checkpoint has a known format that is not read."""
    weights = sorted(folder.glob("*.safetensors"))
    if (wanted or not weights) and (found := choosing.in_folder(folder, wanted)) is not None:
        return readable_file(found)
    for path in [*weights, folder / "tokenizer.json", folder / "config.json"]:
        if _begins(path, _LFS):
            raise ModelError(
                f"{path} is a Git-LFS pointer, not the file itself: run `git lfs pull` in {folder}, or set"
                f" PETIOLE_MODEL to the hub id"
            )
    return folder


def _begins(path: Path, prefix: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError:  # the reader of the file raises that error
        return False
