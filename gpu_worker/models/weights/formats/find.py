"""Which format a linear layer is stored in: decided by the tensors beside its name, for each layer alone."""

from __future__ import annotations

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.safetensors import DTYPES
from petiole.gpu_worker.models.weights.formats import awq, compressed_tensors, fp8, gguf, gptq, modelopt
from petiole.gpu_worker.models.weights.formats.layer_tensors import SUFFIXES, LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.formats.unread import check_layer


def format_of(beside: LayerTensors) -> WeightFormat | None:
    """None: the layer is not quantised. Raises ModelError for a format half present, or one that config.json
    contradicts."""
    found = _found(beside)
    if found is None:
        return None
    if found.kind not in beside.declared.kinds:
        named = beside.declared.method or "none"
        raise ModelError(
            f"config.json: quant_method must be that of the tensors of {beside.at} ({found.name}, {found.kind}),"
            f" got {named}"
        )
    return found


def _found(beside: LayerTensors) -> WeightFormat | None:
    check_layer(beside.at, beside.has)
    main = [suffix for suffix in (".qweight", ".weight_packed", ".weight") if beside.has(suffix)]
    there = [suffix for suffix in SUFFIXES if beside.has(suffix)]
    if len(main) > 1:
        raise beside.wrong(main[1], f"be absent beside {main[0]}", "both")
    if not main:
        if not there:
            return None
        wanted = ".qweight" if there[0] in (".qzeros", ".scales", ".g_idx") else ".weight"
        raise ModelError(f"tensor {beside.at}{wanted} is missing: the checkpoint has {beside.at}{there[0]}")
    if main[0] == ".qweight":
        named = {"gptq": gptq.GPTQ, "awq": awq.AWQ}.get(beside.declared.method)
        return named or (awq.AWQ if beside.shape(".qweight")[:1] == (beside.inputs,) else gptq.GPTQ)
    if main[0] == ".weight_packed":
        if beside.dtype(".weight_packed") != "U8":
            return compressed_tensors.PACKED
        return compressed_tensors.MXFP4 if _has_powers(beside) else compressed_tensors.NVFP4
    return _of_weight(beside, [suffix for suffix in there if suffix != ".weight"])


def _of_weight(beside: LayerTensors, others: list[str]) -> WeightFormat | None:
    """others: the tensors beside `weight`."""
    dtype = beside.dtype(".weight")
    if dtype in DTYPES:
        if others:
            raise beside.wrong(".weight", f"be quantised, to have {beside.at}{others[0]} beside it", dtype)
        return None
    known = {"F8_E4M3": fp8.FP8, "I8": compressed_tensors.INTEGERS, "U8": modelopt.NVFP4, **gguf.FORMATS}
    if dtype not in known:
        raise beside.wrong(".weight", f"be of type {', '.join([*DTYPES, *known])}", dtype)
    return known[dtype]


def _has_powers(beside: LayerTensors) -> bool:
    return not beside.has(".weight_global_scale") and beside.dtype(".weight_scale") in ("U8", "F8_E8M0")
