"""What config.json says of quantised weights: little. Tensors say how a layer is stored; lists of layers are not
read. The configuration tells apart what tensors cannot, and must not contradict them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.weights.formats.unread import INSTEAD, named_in, refused

METHODS: dict[str, frozenset[str]] = {
    "": frozenset({"compressed-tensors", "fp8", "modelopt", "mxfp4"}),
    "compressed-tensors": frozenset({"compressed-tensors", "fp8", "mxfp4"}),
    "fp8": frozenset({"fp8"}),
    "modelopt": frozenset({"modelopt", "fp8", "mxfp4"}),
    "modelopt_fp4": frozenset({"modelopt", "fp8"}),
    "mxfp4": frozenset({"mxfp4"}),
    "gptq": frozenset({"gptq"}),
    "awq": frozenset({"awq"}),
    "gguf": frozenset({"gguf"}),
    "auto-round": frozenset({"gptq", "awq"}),
}
"""For each `quant_method` the kinds of formats (`reader.WeightFormat`) that its checkpoints may have. "": none
named."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """method: `quant_method`, "" if there is no quantization_config. bits, group: of all layers; None: unnamed, or
    not the same for all. group -1: the whole input. zeros_less_one: GPTQ's first format stores zeros minus one.
    block: outputs and inputs with one scale."""

    method: str = ""
    bits: int | None = None
    group: int | None = None
    zeros_less_one: bool = True
    block: tuple[int, int] | None = None

    @property
    def kinds(self) -> frozenset[str]:
        return METHODS[self.method]


def declared_by(raw: JsonObject) -> QuantizationConfig:
    """Raises ModelError for methods that are not read."""
    inner = raw.get("text_config")
    given = raw.get("quantization_config") or (isinstance(inner, Mapping) and inner.get("quantization_config"))
    if (unread := named_in(given if isinstance(given, Mapping) else {}, raw)) is not None:
        raise refused("config.json", unread)
    if not given:
        return QuantizationConfig()
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: quantization_config must be an object, got {shown(given)}")
    method = str(given.get("quant_method") or "").lower()
    if method not in METHODS or not method:
        known = ", ".join(name for name in METHODS if name)
        raise ModelError(f"config.json: quant_method must be one of {known}, got {shown(method)}: {INSTEAD}")
    _refuse_unread(given)
    if method == "compressed-tensors":
        return _compressed_tensors(given)
    uniform = not given.get("dynamic") and not given.get("extra_config")
    layout = str(given.get("checkpoint_format") or given.get("format") or "gptq").lower()
    block = given.get("weight_block_size")
    return QuantizationConfig(
        method=method,
        bits=_number(given, "bits") if uniform else None,
        group=_number(given, "group_size") if uniform else None,
        zeros_less_one=layout != "gptq_v2",
        block=None if block is None else _block(block),
    )


def _refuse_unread(given: Mapping[str, Any]) -> None:
    sparsity = given.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and str(sparsity.get("format") or "dense") != "dense":
        raise ModelError(f"config.json: sparsity_config: format must be dense, got {shown(sparsity['format'])}")
    if given.get("transform_config"):
        raise ModelError("config.json: transform_config must be empty (rotations are not computed), got one")
    packing = str(given.get("packing_format") or "auto_round:auto_gptq")
    if not packing.endswith(("auto_gptq", "auto_awq")):
        raise ModelError(
            "config.json: packing_format must be auto_round:auto_gptq or auto_round:auto_awq,"
            f" got {shown(packing)}"
        )


def _compressed_tensors(given: Mapping[str, Any]) -> QuantizationConfig:
    groups = given.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    if len(weights) != 1:
        return QuantizationConfig("compressed-tensors")
    block = weights[0].get("block_structure")
    return QuantizationConfig(
        method="compressed-tensors",
        bits=_number(weights[0], "num_bits"),
        group=_number(weights[0], "group_size") if weights[0].get("strategy") == "group" else None,
        block=None if block is None else _block(block.split("x") if isinstance(block, str) else block),
    )


def _number(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value <= 2**20):
        raise ModelError(f"config.json: {key} must be -1 or a whole number from 1 to {2**20}, got {shown(value)}")
    return value


def _block(value: object) -> tuple[int, int]:
    sizes = [int(size) if str(size).isdigit() else size for size in value] if isinstance(value, list) else []
    whole = all(isinstance(size, int) and not isinstance(size, bool) and 1 <= size <= 2**20 for size in sizes)
    if len(sizes) != 2 or not whole:
        raise ModelError(f"config.json: a block must be two whole numbers from 1 to {2**20}, got {shown(value)}")
    return sizes[0], sizes[1]
