"""Checkpoints of other tools, with config.json and tensors named as these tools write them: one line says which
format it is and what to take instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from petiole.gpu_worker.exceptions import ModelError
from tests.support.families import SHAPE

LAYER, EMBEDDING = "model.layers.0.self_attn.q_proj", "model.embed_tokens"
BYTES, HALF, INTS = torch.zeros(4, 1).to(torch.uint8), torch.zeros(64, 1).half(), torch.zeros(64, 8).int()
WORDS = torch.zeros(64, 8, dtype=torch.uint32)
_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}

WRITTEN: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}},
        {f"{LAYER}.weight": WORDS, f"{LAYER}.scales": HALF, f"{LAYER}.biases": HALF},
        "MLX",
    ),
    "mlx with half of its configuration": (
        {"quantization_config": {"group_size": 64, "bits": 4, "mode": "affine"}},
        {f"{LAYER}.weight": WORDS, f"{LAYER}.scales": HALF, f"{LAYER}.biases": HALF},
        "MLX",
    ),
    "mlx without its configuration": (
        {},
        {f"{LAYER}.weight": WORDS, f"{LAYER}.scales": HALF, f"{LAYER}.biases": HALF},
        "MLX",
    ),
    "bitsandbytes nf4": (
        {"quantization_config": {"quant_method": "bitsandbytes", **_NF4}},
        {f"{LAYER}.weight": BYTES, f"{LAYER}.weight.absmax": BYTES, f"{LAYER}.weight.quant_map": HALF},
        "bitsandbytes",
    ),
    "bitsandbytes of old": (
        {"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 6.0}},
        {f"{LAYER}.weight": BYTES, f"{LAYER}.SCB": HALF},
        "bitsandbytes",
    ),
    "bitsandbytes without its configuration": (
        {},
        {f"{LAYER}.weight": BYTES, f"{LAYER}.SCB": HALF},
        "bitsandbytes",
    ),
    "hqq": (
        {"quantization_config": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}},
        {f"{LAYER}.W_q": BYTES, f"{LAYER}.scale": HALF, f"{LAYER}.zero": HALF},
        "HQQ",
    ),
    "torchao": (
        {
            "quantization_config": {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnly"}},
            }
        },
        {f"{LAYER}._weight_qdata": BYTES, f"{LAYER}._weight_scale": HALF},
        "torchao",
    ),
    "awq gemv": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}},
        {f"{LAYER}.qweight": INTS},
        "AWQ gemv",
    ),
    "gptq of two bits": (
        {"quantization_config": _GPTQ | {"bits": 2}},
        {f"{LAYER}.qweight": INTS},
        "GPTQ of 2 bits",
    ),
    "an embedding in codes": (
        {"quantization_config": _GPTQ},
        {f"{EMBEDDING}.qweight": INTS, f"{EMBEDDING}.scales": HALF},
        "of an embedding in codes",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_it_is_refused_by_name_with_what_to_take_instead(
    name: str, tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    config, tensors, format = WRITTEN[name]
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE, **config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    plain = {} if f"{EMBEDDING}.qweight" in tensors else {f"{EMBEDDING}.weight": torch.zeros(320, 64)}
    norm = {"model.layers.0.input_layernorm.weight": torch.ones(64)}
    written = {name: tensor.clone() for name, tensor in {**plain, **norm, **tensors}.items()}
    save_file(written, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_runtime(tmp_path)
    message = str(caught.value)
    assert (
        f"the format {format} is not read: take the plain checkpoint with PETIOLE_WEIGHT_QUANTIZATION" in message
    )
    assert "\n" not in message
