"""Opens a checkpoint and identifies it by its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from petiole.gpu_worker.models.checkpoint.gguf import choosing
from petiole.gpu_worker.models.checkpoint.gguf.tensors import GgufTensors
from petiole.gpu_worker.models.checkpoint.opening import config_of, is_gguf
from petiole.gpu_worker.models.checkpoint.safetensors import DTYPES, Checkpoint

_DRAFTS = "mtp"
"""What keys and tensors of a head that drafts begin with. No token depends on it."""
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})


def open_checkpoint(model: Path, modules: Sequence[str] = ()) -> Checkpoint:
    """The tensors of a folder or of a GGUF file. modules: see `Checkpoint`. Raises ModelError."""
    pieces = [GgufTensors(piece) for piece in choosing.pieces_of(model)] if is_gguf(model) else ()
    return Checkpoint(model, pieces, modules)


def fingerprint(folder: Path, modules: Sequence[str] = (), more: str = "") -> str:
    """A hash of what a model's tokens depend on: its configuration, and each tensor's name, dtype, shape and first
    bytes. modules: see `Checkpoint`. more: what else its outputs depend on.

    A checkpoint has the same hash on any machine and with any sharding. Reads a few hundred bytes per tensor.
    """
    raw = {k: v for k, v in config_of(folder).items() if k not in _VOLATILE_KEYS and not k.startswith(_DRAFTS)}
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode() + more.encode())
    with open_checkpoint(folder, modules) as checkpoint:
        for name in checkpoint.names():
            if name.startswith(_DRAFTS):
                continue
            entry = checkpoint.entry(name)
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            digest.update(checkpoint.sample(name))
    return digest.hexdigest()[:16]


def stored_dtype(folder: Path) -> str:
    """The type of a checkpoint's weights, such as "bfloat16". As in transformers, it is the type of the first
    floating-point tensor; "" if there is none."""
    with open_checkpoint(folder) as checkpoint:
        stored = (entry.dtype for file in checkpoint.files for entry in file.entries.values())
        return next((str(DTYPES[name]).removeprefix("torch.") for name in stored if name in DTYPES), "")
