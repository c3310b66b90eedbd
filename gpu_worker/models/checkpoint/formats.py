"""Recognises checkpoints in formats that are not read. The refusal names the format, and what to use instead."""

from __future__ import annotations

from pathlib import Path

from petiole.gpu_worker.errors import ModelError

_LFS = b"version https://git-lfs.github.com/spec/"
_PLAIN = "a folder in Hugging Face format with plain safetensors weights, or a hub id"
EIGHT_BITS = "for eight bits set PETIOLE_WEIGHT_QUANTIZATION (weight_quantization of EngineConfig) to int8 or fp8"


def refuse_file(path: Path) -> None:
    """Raises `ModelError` for a file where a model's folder is expected."""
    what = "a GGUF file, llama.cpp's format" if path.suffix == ".gguf" else "a file"
    raise ModelError(f"model {path} is {what}: PETIOLE_MODEL must be {_PLAIN}; {EIGHT_BITS}")


def refuse(folder: Path) -> None:
    """Raises `ModelError` if the folder's checkpoint has a known format that is not read."""
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and (found := sorted(folder.glob("*.gguf"))):
        raise ModelError(
            f"model folder {folder} has GGUF weights ({found[0].name}), llama.cpp's format: PETIOLE_MODEL must be"
            f" {_PLAIN}; {EIGHT_BITS}"
        )
    for path in [*weights, folder / "tokenizer.json", folder / "config.json"]:
        if _begins(path, _LFS):
            raise ModelError(
                f"{path} is a Git-LFS pointer, not the file itself: run `git lfs pull` in {folder}, or set"
                f" PETIOLE_MODEL to the hub id"
            )


def _begins(path: Path, prefix: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError:  # the reader of the file raises that error
        return False
