"""The files of BGE-M3 beside a checkpoint: products that make something of each token, a file each.

sparse_linear.safetensors    weight [1, hidden], bias [1]: each token's weight in a search by words
colbert_linear.safetensors   weight [numbers, hidden], bias [numbers]: each token's vector

They are published as pickles, `sparse_linear.pt` and `colbert_linear.pt`, which are not read. A model with these
makes vectors of texts alone, and the refusal of the rest says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from petiole.contract.results.vectors import COLBERT, SPARSE
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.safetensors import SafetensorsFile
from petiole.gpu_worker.models.plan import Dense

_STEMS = {SPARSE: "sparse_linear", COLBERT: "colbert_linear"}


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """products: those that the folder has, by the name of the output; files: theirs. lacking: of the others, why
    they are not computed."""

    products: Mapping[str, Dense]
    files: tuple[str, ...]
    lacking: Mapping[str, str]


def read_token_heads(folder: Path, hidden: int) -> TokenHeads:
    """Raises ModelError for a file with other tensors than are meant."""
    products, files, lacking = dict[str, Dense](), list[str](), dict[str, str]()
    for output, stem in _STEMS.items():
        path, pickle = folder / f"{stem}.safetensors", folder / f"{stem}.pt"
        if path.is_file():
            products[output] = _product(path, stem, hidden, output)
            files.append(path.name)
        elif pickle.exists():
            instead = f"{path.name} with the tensors weight and bias must stand beside it"
            lacking[output] = f"{pickle.name} is a pickle, which is not read: {instead}"
    return TokenHeads(products, tuple(files), lacking)


def _product(path: Path, stem: str, hidden: int, output: str) -> Dense:
    entries = SafetensorsFile(path).entries
    shape = entries["weight"].shape if "weight" in entries else ()
    one = output == SPARSE
    if len(shape) != 2 or shape[1] != hidden or (one and shape[0] != 1):
        limit = f"weight must have shape [{1 if one else 'numbers'}, {hidden}]"
        raise ModelError(f"{path}: {limit}, got {list(shape) or 'none'}")
    return Dense(stem, hidden, shape[0], "bias" in entries)
