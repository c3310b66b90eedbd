"""Formats of weights that are not read, by what config.json says and by names of tensors. The refusal names the
format and what to take instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from petiole.gpu_worker.exceptions import ModelError

INSTEAD = (
    "take the plain checkpoint with PETIOLE_WEIGHT_QUANTIZATION=int4, or one in GPTQ, AWQ, compressed-tensors or"
    " GGUF (Q8_0)"
)
METHODS = {
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "torchao": "torchao",
    "quanto": "Quanto",
    "aqlm": "AQLM",
    "eetq": "EETQ",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "higgs": "HIGGS",
    "quip": "QuIP#",
    "spqr": "SpQR",
    "vptq": "VPTQ",
    "bitnet": "BitNet",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp_quant": "FP-Quant",
    "quark": "Quark",
    "mlx": "MLX",
}
"""By `quant_method`."""
_TENSORS = {
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".biases": "MLX",
    ".W_q": "HQQ",
    ".weight._data": "Quanto",
    ".weight_qdata": "torchao",
    "._weight_qdata": "torchao",
    ".trellis": "EXL3",
    ".q_weight": "EXL2",
}
"""By a tensor beside the name of a layer."""
_OF_EMBEDDINGS = (".qweight", ".weight_packed", ".weight_scale", ".scales", ".qzeros")


def is_beside_codes(name: str) -> bool:
    """Whether only formats of codes have a tensor of this name."""
    return name.endswith((*_TENSORS, *_OF_EMBEDDINGS))


def refused(where: str, name: str) -> ModelError:
    """where: config.json, or a tensor."""
    return ModelError(f"{where}: the format {name} is not read: {INSTEAD}")


def named_in(given: Mapping[str, Any], raw: Mapping[str, Any]) -> str | None:
    """The format of a `quantization_config`, or of a config.json with none. None: none of these."""
    method = str(given.get("quant_method") or "").lower()
    if not method and given.keys() & {"load_in_4bit", "load_in_8bit"}:
        return METHODS["bitsandbytes"]
    if not method and any(isinstance(one, Mapping) and "bits" in one for one in (given, raw.get("quantization"))):
        return METHODS["mlx"]
    bits = given.get("bits")
    if method in ("gptq", "auto-round", "awq") and isinstance(bits, int) and bits not in (4, 8):
        return f"{method.upper()} of {bits} bits"
    version = str(given.get("version") or "gemm").lower()
    if method == "awq" and version != "gemm":
        return f"AWQ {version}"
    return METHODS.get(method)


def check_layer(at: str, has: Callable[[str], bool]) -> None:
    """at: the name of a layer. Raises ModelError."""
    for suffix, name in _TENSORS.items():
        if has(suffix):
            raise refused(f"tensor {at}{suffix}", name)


def check_embedding(at: str, has: Callable[[str], bool]) -> None:
    """Raises ModelError for one in codes."""
    check_layer(at, has)
    for suffix in _OF_EMBEDDINGS:
        if has(suffix):
            raise refused(f"tensor {at}{suffix}", "of an embedding in codes")
