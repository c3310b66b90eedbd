"""Finds a checkpoint. A model's name is a folder, a GGUF file, a model that ships with the project (`SHIPPED`) or
a Hugging Face hub id. `:Q4_K_M` behind a folder or an id means its GGUF file of this name.
"""

from __future__ import annotations

import atexit
import glob
import hashlib
from contextlib import suppress
from pathlib import Path

from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models.checkpoint.gguf import choosing
from petiole.gpu_worker.models.checkpoint.opening import is_gguf

SHIPPED = {
    "petiole-tiny": "petiole_tiny",
    "petiole-tiny-embed": "petiole_tiny/embed",
    "petiole-tiny-tools": "petiole_tiny/tools",
    "petiole-tiny-vision": "petiole_tiny/vision",
}
"""Their folders in `gpu_worker/models`, by their names."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
CONFIGURATION = [
    "config.json",
    "modules.json",
    "*/config.json",
    "*sentence_transformers.json",
    "*bert_config.json",
]
"""What says how a model is computed."""
_HUB_COPIES = ["consolidated*.safetensors", "original/*", "onnx/*"]
"""Files on the hub that are not downloaded: copies of the weights in other formats."""


def resolve_model(
    model: str, revision: str | None = None, *, download: bool = True, files: list[str] = _HUB_FILES
) -> Path:
    """The local folder of a model, or its GGUF file. Downloads it from the hub if needed. download False: takes
    what the hub's cache has of it. files: patterns of what is downloaded.

    Respects HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, like huggingface_hub.
    """
    if model in SHIPPED:
        return Path(__file__).parent.parent / SHIPPED[model]
    place, wanted = model, ""
    try:
        if not Path(model).expanduser().exists():
            place, wanted = choosing.parted(model)
        path = Path(place).expanduser()
        if path.is_dir():
            return readable(path, wanted)
        if path.is_file() and wanted:
            raise ModelError(f"model {path} is a file: nothing may stand after a colon, got {wanted}")
        if path.is_file():
            return readable_file(path)
    except (
        OSError,
        RuntimeError,
    ) as error:  # an unreadable folder, a name that is too long, the "~" of an unknown user
        raise ModelError(f"model folder {model}: {error}") from error
    if path.is_absolute() or place.startswith((".", "~")) or place.count("/") > 1:
        raise ModelError(f"model {'file' if is_gguf(path) else 'folder'} {place} does not exist")
    return _download(place, revision, wanted, files) if download else _cached(place, revision, wanted)


def _download(model: str, revision: str | None, wanted: str, files: list[str]) -> Path:
    """wanted: see `gguf.choosing`. Of a repository without safetensors only one GGUF file is downloaded, and none
    if `files` are no weights."""
    from huggingface_hub import snapshot_download

    atexit.register(_remove_unfinished_downloads)
    where = f"{model}@{revision}" if revision else model
    try:
        if not wanted:
            found = Path(
                snapshot_download(model, revision=revision, allow_patterns=files, ignore_patterns=_HUB_COPIES)
            )
            complete = files is not _HUB_FILES or any(found.glob("*.safetensors"))
            if complete or not (names := _ggufs(model, revision, where, wanted)):
                return readable(found)
        else:
            names = _ggufs(model, revision, where, wanted)
        patterns = [glob.escape(name) for name in names]
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns)) / names[0]
    except ModelError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MachineError(
            f"model {where} is not a local folder, and the hub does not provide it: {reason}"
        ) from error


def _ggufs(model: str, revision: str | None, where: str, wanted: str) -> list[str]:
    """The files of the one GGUF model of a repository; none if it has no such files. If the hub cannot be asked,
    they are those in its cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

    try:
        listed = [*HfApi().list_repo_tree(model, recursive=True, revision=revision)]
        sizes = {one.path: one.size for one in listed if isinstance(one, RepoFile)}
    except HfHubHTTPError:
        raise
    except Exception:  # offline, by a setting or by a network that is down
        folder = _in_cache(model, revision)
        found = choosing.in_folder(folder, wanted)
        return [] if found is None else [str(one.relative_to(folder)) for one in choosing.pieces_of(found)]
    return choosing.choose(f"model {where}", sizes, wanted)


def _cached(model: str, revision: str | None, wanted: str) -> Path:
    try:
        return readable(_in_cache(model, revision), wanted)
    except ModelError:
        raise
    except Exception as error:
        raise MachineError(
            f"model {model} must be a local folder or in the hub's cache: `hf download {model} config.json` "
            f"fetches its configuration alone"
        ) from error


def _in_cache(model: str, revision: str | None) -> Path:
    """The folder of the hub's cache with what was downloaded of a repository. It need not be everything."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=[]))


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


def files_of_weights(model: Path) -> str:
    """A hash of the names, sizes and times of a model's files of weights, as this machine has them. Quicker than
    their content, which `fingerprint` samples, and different for each change."""
    files = choosing.pieces_of(model) if is_gguf(model) else sorted(model.rglob("*.safetensors"))
    found = [(path.name, status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


# ------------------------------------------------------------ formats that are not read


_LFS = b"version https://git-lfs.github.com/spec/"
_PLAIN = "a folder in Hugging Face format with safetensors weights, a GGUF file, or a hub id"


def readable_file(path: Path) -> Path:
    """A GGUF file, or the first piece of one. Raises `ModelError` for other files."""
    if path.suffix == ".gguf":
        first = choosing.pieces_of(path)[0]
        _refuse_pointer(first)
        return first
    raise ModelError(f"model {path} is a file: PETIOLE_MODEL must be {_PLAIN}")


def readable(folder: Path, wanted: str = "") -> Path:
    """The folder, or the GGUF file in it whose name ends in `wanted`. Raises `ModelError` if the folder's
    checkpoint has a known format that is not read."""
    weights = sorted(folder.glob("*.safetensors"))
    if (wanted or not weights) and (found := choosing.in_folder(folder, wanted)) is not None:
        return readable_file(found)
    for path in [*weights, folder / "tokenizer.json", folder / "config.json"]:
        _refuse_pointer(path)
    return folder


def _refuse_pointer(path: Path) -> None:
    """Raises `ModelError` for what stands for a file that Git LFS has not fetched."""
    try:
        with path.open("rb") as file:
            found = file.read(len(_LFS))
    except OSError:  # the reader of the file raises that error
        return
    if found == _LFS:
        raise ModelError(
            f"{path} is a Git-LFS pointer, not the file itself: run `git lfs pull` in {path.parent}, or set"
            f" PETIOLE_MODEL to the hub id"
        )
