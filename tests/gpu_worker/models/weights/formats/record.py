"""Records linear layers as the reference libraries write and read them: one safetensors file a format, with the
quantization_config in its metadata, and the weight as the library itself dequantises it ("expected").

    python tests/gpu_worker/models/weights/formats/record.py compressed-tensors awq fp8
    python tests/gpu_worker/models/weights/formats/record.py gptq
    python tests/gpu_worker/models/weights/formats/record.py gguf grids

The libraries are none of the project's: this ran with torch 2.13 (CPU), transformers 5.24, compressed-tensors
0.20, autoawq 0.2.9, gptqmodel 7.7 and gguf 0.19. The file imports nothing of the project."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent
OUTPUTS, INPUTS, GROUP = 64, 128, 32


def weight(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """With a few outputs far from the rest, and groups that are not symmetric."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    drawn[::7] *= 6
    drawn[:, 40:70] += 0.1
    return drawn.to(dtype)


def save(name: str, tensors: dict[str, Tensor], config: dict[str, Any], expected: Tensor) -> None:
    stored = {f"layer.{key}": value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(
        stored | {"expected": expected.detach().contiguous()},
        str(FOLDER / f"{name}.safetensors"),
        {"quantization_config": json.dumps(config)},
    )
    print(name, {key: (str(t.dtype), list(t.shape)) for key, t in stored.items()})


def compressed_tensors(name: str, compressor: str, **arguments: Any) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    w = weight()
    size = args.group_size or INPUTS
    state: dict[str, Tensor] = {"weight": w}
    if args.strategy == "tensor":
        low, high = w.min().reshape(1), w.max().reshape(1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = w.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        groups = w.unflatten(1, (-1, size if args.strategy != "channel" else INPUTS))
        low, high = groups.amin(-1), groups.amax(-1)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(w.min(), w.max())
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    kind = BaseCompressor.get_value_from_registry(compressor)
    stored = kind.compress(state, scheme)
    expected = kind.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": compressor,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }
    save(name, stored, config, expected)


def all_compressed_tensors() -> None:
    integers = {"num_bits": 4, "type": "int"}
    grouped = {"strategy": "group", "group_size": GROUP}
    for symmetric, suffix in ((True, "sym"), (False, "asym")):
        compressed_tensors(
            f"ct-w4a16-group-{suffix}", "pack-quantized", **integers, **grouped, symmetric=symmetric
        )
        compressed_tensors(
            f"ct-w4a16-channel-{suffix}", "pack-quantized", **integers, strategy="channel", symmetric=symmetric
        )
    eight = {"num_bits": 8, "type": "int"}
    compressed_tensors("ct-w8a16-group-asym", "pack-quantized", **eight, **grouped, symmetric=False)
    compressed_tensors("ct-w8a8", "int-quantized", **eight, strategy="channel", symmetric=True)
    floats = {"num_bits": 8, "type": "float", "symmetric": True}
    compressed_tensors("ct-fp8-channel", "float-quantized", **floats, strategy="channel")
    compressed_tensors("ct-fp8-tensor", "float-quantized", **floats, strategy="tensor")
    compressed_tensors("ct-fp8-block", "float-quantized", **floats, strategy="block", block_structure=[32, 64])
    four = {"num_bits": 4, "type": "float", "symmetric": True}
    compressed_tensors(
        "ct-nvfp4",
        "nvfp4-pack-quantized",
        **four,
        strategy="tensor_group",
        group_size=16,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
    compressed_tensors(
        "ct-mxfp4",
        "mxfp4-pack-quantized",
        **four,
        strategy="group",
        group_size=32,
        scale_dtype=torch.uint8,
        zp_dtype=torch.uint8,
    )


def awq() -> None:
    kernels = ModuleType("awq.modules.triton.gemm")  # imports triton, which packing does not need
    kernels.__dict__.update(awq_gemm_triton=None, awq_dequantize_triton=None)
    sys.modules["awq.modules.triton.gemm"] = kernels
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    w = weight(torch.float16)
    groups = w.unflatten(1, (-1, GROUP)).float()
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5)
    zeros = (-(low / scales).round()).clamp(0, 15)
    scales = scales.half()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((codes - zeros[..., None]) * scales[..., None]).flatten(1)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = values
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.t().float(), zeros=zeros.t())
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    save("awq", tensors, config, expected)


def fp8() -> None:
    """As transformers reads the checkpoints that Qwen and DeepSeek publish. (It cannot read a last block that is
    smaller.)"""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    w = weight().float()
    block = (32, 64)
    scale = torch.empty(-(-OUTPUTS // block[0]), -(-INPUTS // block[1]))
    codes = torch.empty_like(w)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scale[i, j] = w[at].abs().max() / 448
            codes[at] = w[at] / scale[i, j]
    quantised = codes.to(torch.float8_e4m3fn)
    settings = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block))
    expected = Fp8Dequantize(settings)._dequantize_one(quantised, scale)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    save("fp8-block", {"weight": quantised, "weight_scale_inv": scale}, config, expected)


def gptq() -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits, symmetric, version in ((4, True, 1), (4, False, 1), (4, False, 2), (8, True, 1), (8, False, 2)):
        w, top = weight(torch.float16), 2**bits - 1
        groups = w.unflatten(1, (-1, GROUP)).float()
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales = ((high - low) / top).half().float()
        zeros = (
            (-(low / scales)).round().clamp(1, top) if not symmetric else torch.full_like(scales, (top + 1) // 2)
        )
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
        linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).flatten(1).half()
        packed = TorchLinear(
            bits=bits,
            group_size=GROUP,
            sym=symmetric,
            desc_act=False,
            in_features=INPUTS,
            out_features=OUTPUTS,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )
        order = torch.arange(INPUTS, dtype=torch.int32) // GROUP
        packed.pack_original(linear, scales, zeros, order)
        packed.post_init()
        expected = packed.dequantize_weight().t().clone()
        if version == 1:
            settings = SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            convert_gptq_v2_to_v1_format_module(packed, settings)
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": symmetric}
        config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
        save(f"gptq-{bits}-{'sym' if symmetric else 'asym'}-v{version}", tensors, config, expected)


def gguf() -> None:
    """Blocks of any bits with finite factors, the extremes among them; and what the library makes of them."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    corners = [0.0, -0.0, 6e-8, -6e-8, 6e-5, 1.0, 65504.0, -65504.0]
    draw, tensors = np.random.default_rng(7), {}
    for kind, factors in GGUF_FACTORS.items():
        number = GGMLQuantizationType[kind]
        size = GGML_QUANT_SIZES[number][1]
        blocks = draw.integers(0, 256, (12, 1, size), dtype=np.uint8)
        for at in factors:
            found = draw.normal(0, 0.01, (12, 1)).astype(np.float16)
            found[draw.permutation(12)[:8], 0] = corners
            blocks[..., at : at + 2] = found[..., None].view(np.uint8)
        if kind == "IQ1_M":
            blocks[..., 55] &= 0xBF  # an exponent that is finite
        if kind == "NVFP4":
            blocks[..., :4] &= 0x7F
        if kind == "MXFP4":
            blocks[..., 0] = np.minimum(blocks[..., 0], 254)
            blocks[:4, 0, 0] = 0, 1, 2, 254
        rows = blocks.reshape(12, size)
        tensors[f"{kind}.blocks"] = torch.from_numpy(rows)
        tensors[f"{kind}.values"] = torch.from_numpy(quants.dequantize(rows, number))
    save_file(tensors, str(FOLDER / "gguf.blocks"))


GGUF_FACTORS = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""By type of tensor: bytes of a block with factors in float16."""


def grids() -> None:
    """The grids of IQ types, as places among their sizes."""
    import numpy as np
    from gguf import quants

    names = {"IQ1": quants.IQ1_S} | {
        name: getattr(quants, name) for name in GGUF_FACTORS if name[:3] in ("IQ2", "IQ3")
    }
    tensors = {}
    for name, kind in names.items():
        kind.init_grid()
        found = np.searchsorted(np.array(kind.grid_map, dtype=np.float32), kind.grid[0, 0])
        tensors[name] = torch.from_numpy(found.astype(np.uint8))
    folder = FOLDER.parents[4] / "gpu_worker/models/checkpoint/gguf"
    save_file(tensors, str(folder / "grids.safetensors"))


if __name__ == "__main__":
    parts = {
        "grids": grids,
        "gguf": gguf,
        "compressed-tensors": all_compressed_tensors,
        "awq": awq,
        "fp8": fp8,
        "gptq": gptq,
    }
    for part in sys.argv[1:]:
        parts[part]()
