"""Finds a checkpoint, opens and identifies it. A model's name is a folder, a GGUF file, a model that ships with
the project (`SHIPPED`) or a Hugging Face hub id.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from petiole.gpu_worker.errors import MachineError, ModelError
from petiole.gpu_worker.models.checkpoint import formats
from petiole.gpu_worker.models.checkpoint.gguf.tensors import GgufTensors
from petiole.gpu_worker.models.checkpoint.opening import config_of, is_gguf
from petiole.gpu_worker.models.checkpoint.safetensors import DTYPES, Checkpoint

SHIPPED = {
    "petiole-tiny": "petiole_tiny",
    "petiole-tiny-embed": "petiole_tiny/embed",
    "petiole-tiny-tools": "petiole_tiny/tools",
    "petiole-tiny-vision": "petiole_tiny_vision",
}
"""Their folders in `models`, by their names."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_COPIES = ["consolidated*.safetensors", "original/*", "onnx/*"]
"""Files on the hub that are not downloaded: copies of the weights in other formats."""
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})


def resolve_model(model: str, revision: str | None = None, *, download: bool = True) -> Path:
    """The local folder of a model, or its GGUF file. Downloads it from the hub if needed. download False: takes
    what the hub's cache has of it.

    Respects HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, like huggingface_hub.
    """
    if model in SHIPPED:
        return Path(__file__).parent.parent / SHIPPED[model]
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return formats.readable(path)
        if path.is_file():
            return formats.readable_file(path)
    except (
        OSError,
        RuntimeError,
    ) as error:  # an unreadable folder, a name that is too long, the "~" of an unknown user
        raise ModelError(f"model folder {model}: {error}") from error
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"model folder {model} does not exist")
    return _download(model, revision) if download else _cached(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    atexit.register(_remove_unfinished_downloads)
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"{model}@{revision}" if revision else model
        raise MachineError(
            f"model {where} is not a local folder, and the hub does not provide it: {reason}"
        ) from error
    return formats.readable(Path(found))


def _cached(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return formats.readable(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    except ModelError:
        raise
    except Exception as error:
        raise MachineError(
            f"model {model} must be a local folder or in the hub's cache: `hf download {model} config.json` "
            f"fetches its configuration alone"
        ) from error


def _remove_unfinished_downloads() -> None:
    """When this process ends, remove its unfinished downloads. They take gigabytes, and the hub's client
    would never continue them.

    The client's threads still run: a file that one of them opens or renames at this moment may be left behind.
    """
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()


def open_checkpoint(model: Path, modules: Sequence[str] = ()) -> Checkpoint:
    """The tensors of a folder or of a GGUF file. modules: see `Checkpoint`. Raises ModelError."""
    return Checkpoint(model, [GgufTensors(model)] if is_gguf(model) else (), modules)


def fingerprint(folder: Path, modules: Sequence[str] = (), more: str = "") -> str:
    """A hash of a model's content: its configuration, and each tensor's name, dtype, shape and first bytes.
    modules: see `Checkpoint`. more: what else its outputs depend on.

    A checkpoint has the same hash on any machine and with any sharding. Reads a few hundred bytes per tensor.
    """
    raw = {k: v for k, v in config_of(folder).items() if k not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode() + more.encode())
    with open_checkpoint(folder, modules) as checkpoint:
        for name in checkpoint.names():
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
