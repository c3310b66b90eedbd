"""GGUF files, written by loops that follow the description of the format, without the code of the project."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBERS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "BF16": 30,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "Q1_0": 41,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ1_M": 29,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "MXFP4": 39,
    "NVFP4": 40,
}
ALIGNMENT = 32

KindOf = Mapping[str, str] | Callable[[str, int], str]
Blocks = tuple[bytes, list[float]]
"""The bytes of a row, and the numbers that they stand for."""


def half(value: float) -> float:
    (rounded,) = struct.unpack("<e", struct.pack("<e", value))
    return float(rounded)


def single(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def row_of(kind: str, row: Sequence[float]) -> Blocks:
    """A row, quantised roughly."""
    size = 256 if kind.endswith("K") else 32
    parts = [_BLOCK[kind](row[at : at + size]) for at in range(0, len(row), size)]
    return b"".join(packed for packed, _ in parts), [value for _, values in parts for value in values]


def _q4_0(block: Sequence[float]) -> Blocks:
    d = half(max(map(abs, block)) / 7 or 1.0)
    codes = [min(15, max(0, round(value / d) + 8)) for value in block]
    packed = bytes(codes[j] | codes[j + 16] << 4 for j in range(16))
    return struct.pack("<e", d) + packed, [d * (code - 8) for code in codes]


def _low_bits(codes: Sequence[int]) -> bytes:
    return bytes(codes[j] & 15 | (codes[j + 16] & 15) << 4 for j in range(16))


def _fifth_bits(codes: Sequence[int]) -> bytes:
    return struct.pack("<I", sum((code >> 4) << j for j, code in enumerate(codes)))


def _q5_0(block: Sequence[float]) -> Blocks:
    d = half(max(map(abs, block)) / 15 or 1.0)
    codes = [min(31, max(0, round(value / d) + 16)) for value in block]
    return struct.pack("<e", d) + _fifth_bits(codes) + _low_bits(codes), [d * (code - 16) for code in codes]


def _between(block: Sequence[float], top: int) -> tuple[float, float, list[int]]:
    m = half(min(block))
    d = half((max(block) - m) / top or 1.0)
    return d, m, [min(top, max(0, round((value - m) / d))) for value in block]


def _q4_1(block: Sequence[float]) -> Blocks:
    d, m, codes = _between(block, 15)
    return struct.pack("<ee", d, m) + _low_bits(codes), [d * code + m for code in codes]


def _q5_1(block: Sequence[float]) -> Blocks:
    d, m, codes = _between(block, 31)
    return struct.pack("<ee", d, m) + _fifth_bits(codes) + _low_bits(codes), [d * code + m for code in codes]


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_nl(block: Sequence[float]) -> Blocks:
    d = half(max(map(abs, block)) / 113 or 1.0)
    codes = [min(range(16), key=lambda i: abs(d * _IQ4[i] - value)) for value in block]
    return struct.pack("<e", d) + _low_bits(codes), [d * _IQ4[code] for code in codes]


def _q2_k(block: Sequence[float]) -> Blocks:
    runs = [block[at : at + 16] for at in range(0, 256, 16)]
    lows = [max(0.0, -min(run)) for run in runs]
    spans = [max(run) + low for run, low in zip(runs, lows, strict=True)]
    d, dmin = half(max(spans) / 3 / 15 or 1.0), half(max(lows) / 15 or 1.0)
    steps = [
        (min(15, round(span / 3 / d)), min(15, round(low / dmin))) for span, low in zip(spans, lows, strict=True)
    ]
    codes, values = [], []
    for run, (scale, minimum) in zip(runs, steps, strict=True):
        of_run = [min(3, max(0, round((value + dmin * minimum) / (d * scale or 1.0)))) for value in run]
        codes += of_run
        values += [d * scale * code - dmin * minimum for code in of_run]
    packed = bytes(scale | minimum << 4 for scale, minimum in steps)
    return packed + _two_bits(codes) + struct.pack("<ee", d, dmin), values


def _two_bits(codes: Sequence[int]) -> bytes:
    """Four runs of 32 in 32 bytes."""
    found = [0] * 64
    for i, code in enumerate(codes):
        found[i // 128 * 32 + i % 32] |= (code & 3) << (i % 128 // 32 * 2)
    return bytes(found)


def _q3_k(block: Sequence[float]) -> Blocks:
    runs = [block[at : at + 16] for at in range(0, 256, 16)]
    peaks = [max(map(abs, run)) for run in runs]
    d = half(max(peaks) / 3 / 31 or 1.0)
    steps = [min(63, 32 + round(peak / 3 / d)) for peak in peaks]
    codes = [
        min(7, max(0, round(value / (d * (step - 32) or 1.0)) + 4))
        for run, step in zip(runs, steps, strict=True)
        for value in run
    ]
    high, scales = [0] * 32, [0] * 12
    for i, code in enumerate(codes):
        high[i % 32] |= (code >> 2) << (i // 32)
    for j, step in enumerate(steps):
        scales[j % 8] |= (step & 15) << (j // 8 * 4)
        scales[8 + j % 4] |= (step >> 4) << (j // 4 * 2)
    values = [d * (steps[i // 16] - 32) * (code - 4) for i, code in enumerate(codes)]
    return bytes(high) + _two_bits(codes) + bytes(scales) + struct.pack("<e", d), values


def _q8_0(block: Sequence[float]) -> Blocks:
    d = half(max(map(abs, block)) / 127 or 1.0)
    codes = [min(127, max(-128, round(value / d))) for value in block]
    return struct.pack("<e32b", d, *codes), [d * code for code in codes]


def _q4_k(block: Sequence[float]) -> Blocks:
    head, codes, values = _with_minimums(block, 15)
    return head + _nibbles(codes), values


def _q5_k(block: Sequence[float]) -> Blocks:
    head, codes, values = _with_minimums(block, 31)
    high = bytes(sum((codes[i][j] >> 4) << i for i in range(8)) for j in range(32))
    return head + high + _nibbles([[code & 15 for code in run] for run in codes]), values


def _with_minimums(block: Sequence[float], top: int) -> tuple[bytes, list[list[int]], list[float]]:
    runs = [block[at : at + 32] for at in range(0, 256, 32)]
    lows = [max(0.0, -min(run)) for run in runs]
    spans = [max(run) + low for run, low in zip(runs, lows, strict=True)]
    d, dmin = half(max(spans) / top / 63 or 1.0), half(max(lows) / 63 or 1.0)
    scales = [min(63, max(0, round(span / top / d))) for span in spans]
    minimums = [min(63, max(0, round(low / dmin))) for low in lows]
    codes, values = [], []
    for run, scale, minimum in zip(runs, scales, minimums, strict=True):
        of_run = [min(top, max(0, round((value + dmin * minimum) / (d * scale or 1.0)))) for value in run]
        codes.append(of_run)
        values += [d * scale * code - dmin * minimum for code in of_run]
    return struct.pack("<ee", d, dmin) + _six_bits(scales, minimums), codes, values


def _nibbles(codes: Sequence[Sequence[int]]) -> bytes:
    """Two runs of 32 codes in 32 bytes."""
    return bytes(codes[i][j] | codes[i + 1][j] << 4 for i in range(0, 8, 2) for j in range(32))


def _six_bits(scales: Sequence[int], minimums: Sequence[int]) -> bytes:
    packed = [0] * 12
    for j in range(4):
        packed[j] = scales[j] | (scales[j + 4] >> 4) << 6
        packed[j + 4] = minimums[j] | (minimums[j + 4] >> 4) << 6
        packed[j + 8] = scales[j + 4] & 15 | (minimums[j + 4] & 15) << 4
    return bytes(packed)


def _q6_k(block: Sequence[float]) -> Blocks:
    runs = [block[at : at + 16] for at in range(0, 256, 16)]
    d = half(max(max(map(abs, run)) for run in runs) / 31 / 127 or 1.0)
    scales = [min(127, max(-128, round(max(map(abs, run)) / 31 / d))) for run in runs]
    codes = [
        min(63, max(0, round(value / (d * scale or 1.0)) + 32))
        for run, scale in zip(runs, scales, strict=True)
        for value in run
    ]
    low, high = [0] * 128, [0] * 64
    for i, code in enumerate(codes):
        part, run, j = i // 128, i % 128 // 32, i % 32
        low[part * 64 + run % 2 * 32 + j] |= (code & 15) << (run // 2 * 4)
        high[part * 32 + j] |= (code >> 4) << (2 * run)
    values = [d * scales[i // 16] * (code - 32) for i, code in enumerate(codes)]
    return bytes(low) + bytes(high) + struct.pack("<16be", *scales, d), values


_BLOCK = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
WRITTEN = tuple(_BLOCK)
"""Types that are written here."""


def packed(kind: str, tensor: Tensor) -> tuple[bytes, Tensor]:
    """The bytes of a tensor, and its numbers."""
    if kind in ("F32", "F16", "BF16"):
        stored = tensor.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]).contiguous()
        return stored.view(-1).view(torch.uint8).numpy().tobytes(), stored.float()
    rows = [row_of(kind, row) for row in tensor.tolist()]
    return b"".join(one for one, _ in rows), torch.tensor([values for _, values in rows])


# ------------------------------------------------------------ mixes

_FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_MOST = {"Q2_K": "Q2_K", "Q3_K_M": "Q3_K", "Q4_0": "Q4_0", "Q5_K_M": "Q5_K"} | dict.fromkeys(
    ("Q4_K_S", "Q4_K_M"), "Q4_K"
)
MIXES = (*_MOST, "IQ4_NL")


def mixed(mix: str, layers: int) -> Callable[[str, int], str]:
    """The types of a file, as llama.cpp's quantiser chooses them, with an importance matrix."""

    def wanted(part: str, layer: int) -> str:
        first, last = layer < max(1, layers // 8), layer >= 7 * layers // 8
        more = first or last or (layer - layers // 8) % 3 == 2
        if part in ("output", "token_embd"):
            return "Q6_K"
        if part == "attn_v":
            of_values = {
                "Q2_K": "Q4_K",
                "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
                "Q4_K_S": "Q5_K",
                "IQ4_NL": "Q5_K",
            }
            return of_values.get(mix, "Q6_K" if mix.endswith("K_M") and more else _MOST.get(mix, mix))
        if part == "ffn_down":
            of_first = {"Q4_K_S": "Q5_K", "Q4_0": "Q4_1", "IQ4_NL": "Q5_K", "Q3_K_M": "Q5_K"}
            if mix in ("Q2_K", "Q3_K_M") and not (first and mix in of_first):
                return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}[mix]
            if first and mix in of_first:
                return of_first[mix]
            return "Q6_K" if mix in ("Q4_K_M", "Q5_K_M") and more else _MOST.get(mix, mix)
        if part == "attn_output" and mix in ("Q2_K", "Q3_K_M"):
            return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}[mix]
        return _MOST.get(mix, mix)

    def kind_of(name: str, inputs: int) -> str:
        whole = name.split(".")
        kind = wanted(whole[2], int(whole[1])) if whole[0] == "blk" else wanted(whole[0], 0)
        return kind if inputs % 256 == 0 else _FALLBACKS.get(kind, kind)

    return kind_of


# ------------------------------------------------------------ files


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Sequence[int], bytes]]
) -> Path:
    """tensors: type, shape (the outermost size first) and bytes, by name."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    data = bytearray()
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % ALIGNMENT)
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += _text(name) + struct.pack("<I", len(shape)) + sizes
        head += struct.pack("<IQ", NUMBERS[kind], len(data))
        data += raw
    path.write_bytes(bytes(head) + bytes(-len(head) % ALIGNMENT) + bytes(data))
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    inner = [_value(one) for one in value]
    kind = inner[0][:4] if inner else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(one[4:] for one in inner)


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def name_of(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor of transformers."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return whole.get(name, "output.weight")
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    part, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{(_PARTS | (_OF_GEMMA if architecture == 'gemma3' else {}))[part]}.{kind}"


def turned(tensor: Tensor, heads: int) -> Tensor:
    """The rows of queries or keys as llama.cpp's converter orders them for `llama`."""
    return tensor.view(heads, 2, len(tensor) // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


def turned_back(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(heads, len(tensor) // heads // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)


def metadata_of(architecture: str, config: Any) -> dict[str, Any]:
    """Of a model of transformers, without a tokenizer."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.vocab_size": config.vocab_size,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{architecture}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    if getattr(config, "head_dim", None):
        found[f"{architecture}.attention.key_length"] = config.head_dim
        found[f"{architecture}.attention.value_length"] = config.head_dim
    if rope.get("rope_type") in ("linear", "yarn"):
        found[f"{architecture}.rope.scaling.type"] = rope["rope_type"]
        found[f"{architecture}.rope.scaling.factor"] = float(rope["factor"])
        original = rope.get("original_max_position_embeddings", 0)
        found[f"{architecture}.rope.scaling.original_context_length"] = original
    if architecture == "gemma3":
        found["gemma3.attention.sliding_window"] = config.sliding_window
    return found


def llama3_factors(rope: Mapping[str, Any], width: int) -> Tensor:
    """What llama.cpp's converter stores of a rotation scaled as in Llama 3.1."""
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    factors = []
    for i in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / width)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            blend = (original / length - low) / (high - low)
            factors.append(1 / ((1 - blend) / rope["factor"] + blend))
    return torch.tensor(factors)


def save_model(path: Path, model: Any, architecture: str, kind_of: KindOf, default: str) -> Any:
    """Write a model of transformers, whose weights become those that the file stands for. kind_of: types by the
    part of a name, or a function of a matrix's name in the file and its inputs; default: of all other matrices.
    Returns the metadata."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors: dict[str, tuple[str, Sequence[int], bytes]] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.data.float()
        part = name.split(".")[-2]
        kind = "F32"
        if tensor.ndim > 1 and callable(kind_of):
            kind = kind_of(name_of(name, architecture), tensor.shape[1])
        elif tensor.ndim > 1 and not callable(kind_of):
            kind = next((kind for one, kind in kind_of.items() if one in name), default)
        whose = heads.get(part) if architecture == "llama" else None
        if whose is not None:
            tensor = turned(tensor, whose)
        one = architecture == "gemma3" and name.endswith("norm.weight")
        raw, values = packed(kind, tensor + 1 if one else tensor)
        tensors[name_of(name, architecture)] = kind, tuple(tensor.shape), raw
        values = values - 1 if one else values
        parameter.data = values if whose is None else turned_back(values, whose)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        factors = llama3_factors(rope, config.hidden_size // config.num_attention_heads)
        tensors["rope_freqs.weight"] = "F32", tuple(factors.shape), packed("F32", factors)[0]
    metadata = metadata_of(architecture, config)
    write(path, metadata, tensors)
    return metadata
