"""Recognises checkpoints in formats that are not read. The refusal names the format, and what to use instead."""

from __future__ import annotations

from pathlib import Path

from petiole.gpu_worker.errors import ModelError

_LFS = b"version https://git-lfs.github.com/spec/"
_PLAIN = "a folder in Hugging Face format with safetensors weights, a GGUF file, or a hub id"


def readable_file(path: Path) -> Path:
    """A GGUF file. Raises `ModelError` for other files."""
    if path.suffix == ".gguf":
        return path
    raise ModelError(f"model {path} is a file: PETIOLE_MODEL must be {_PLAIN}")


def readable(folder: Path) -> Path:
    """The folder, or the GGUF file in it. Raises `ModelError` if the folder's checkpoint has a known format that
    is not read."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and (found := sorted(folder.glob("*.gguf"))):
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise ModelError(f"model folder {folder} has {names}: PETIOLE_MODEL must name one of these files")
        return found[0]
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
