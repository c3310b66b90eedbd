"""Models of transformers as GGUF files: the package `gguf` names the tensors and writes the file, and what
llama.cpp's converter changes in them is here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.gguf import turned

_NORMS_WITH_ONE = ("gemma", "gemma2", "gemma3", "gemma-embedding", "qwen3next", "qwen35", "qwen35moe")
_ROTATED_PAIRS = ("llama", "granite", "granitehybrid", "smollm3", "mistral3")
_SCANNING = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
_EXPERT = re.compile(r"(.*)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = re.compile(r"(.*experts)\.(gate_up_proj|down_proj)(_bias)?")


def grid(model: Any) -> Any:
    """The model with weights that Q8_0 holds exactly: in each block a largest one that is 127 steps."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.shape[-1] % 32 == 0:
            steps = torch.randint(-127, 128, parameter.shape)
            steps[..., ::32] = 127
            if parameter.ndim > 2 or ".c_" in name:  # experts of gpt-oss and GPT-2 are stored with inputs first
                steps[..., ::32, :] = 127
            if name.endswith("kv_b_proj.weight"):  # the rows of keys become columns
                steps.view(model.config.num_attention_heads, -1, steps.shape[1])[:, ::32] = 127
            parameter.data = steps / 512
    return model


def _kv_heads(config: Any) -> int:
    """Of the whole model, where layers may differ."""
    found: int = config.to_dict().get("num_key_value_heads", config.num_attention_heads)
    return found


def _as_converted(architecture: str, config: Any, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names that the converter looks up."""
    experts: dict[str, dict[int, Tensor]] = {}
    joined: dict[str, dict[str, Tensor]] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": _kv_heads(config)}
    for name, tensor in stored.items():
        part = name.split(".")[-2] if "." in name else ""
        if architecture in _SCANNING and (scan := _scan(config, name, tensor)) is not None:
            yield from scan
            continue
        if (expert := _EXPERT.fullmatch(name)) and "experts" in name:
            at = "layers.{}.feed_forward.experts".format(name.split(".")[2]) if expert[3][0] == "w" else expert[1]
            at = at.replace("backbone", "model").replace("mixer", "mlp")
            experts.setdefault(f"{at}.{expert[3]}.weight", {})[int(expert[2])] = tensor
        elif architecture == "gemma4" and _FUSED.fullmatch(name):
            yield f"{name}.weight", tensor
        elif fused := _FUSED.fullmatch(name):  # gpt-oss: inputs first, gate and up take turns
            whole, kind = tensor if fused[3] else tensor.transpose(1, 2), "bias" if fused[3] else "weight"
            if fused[2] == "down_proj":
                yield f"{fused[1]}.down_proj.{kind}", whole
            else:
                yield f"{fused[1]}.gate_proj.{kind}", whole[:, ::2]
                yield f"{fused[1]}.up_proj.{kind}", whole[:, 1::2]
        elif "pooler" in name or "position_ids" in name:
            continue
        elif name.endswith("layer_scalar"):
            yield f"{name}.weight", tensor
        elif name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            yield f"blk.{name.split('.')[2]}.{part}.scale", tensor
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
        elif name.endswith("expert_bias"):
            yield f"{name}.bias", tensor
        elif architecture == "gpt2" and ".c_" in name and name.endswith("weight"):
            yield name, tensor.t()
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor.squeeze(0)
        elif name.endswith("sinks"):
            yield f"{name}.weight", tensor
        elif name.endswith("conv.conv.weight"):
            yield name, tensor.squeeze(1)
        elif part in ("q_proj", "k_proj", "v_proj") and getattr(config, "qkv_in_one", False):
            joined.setdefault(f"blk.{name.split('.')[2]}.attn_qkv.{name.split('.')[-1]}", {})[part] = tensor
        elif name.endswith("kv_b_proj.weight") and not getattr(config, "in_one", False):
            both = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
            keys, values = torch.split(both, [config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif ".linear_attn." in name:
            yield from _delta_net(architecture, config, name, tensor)
        elif architecture in _ROTATED_PAIRS and part in heads:
            yield name, turned(tensor.view(len(tensor), -1), heads[part]).view(tensor.shape)
        elif architecture in _NORMS_WITH_ONE and name.endswith("norm.weight"):
            yield name, tensor + 1
        else:
            yield name, tensor
    for name, by_number in experts.items():
        yield name, torch.stack([by_number[i] for i in range(len(by_number))])
    for name, parts in joined.items():
        yield name, torch.cat([parts[f"{one}_proj"] for one in "qkv"])


def _scan(config: Any, name: str, tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """A tensor of Mamba-2, or of what its models have beside; None: it is stored as in others."""
    at = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    of_mixer = ".mamba." in name or ".mixer." in name
    if name.endswith("A_log"):
        return [(f"{at}.ssm_a", -tensor.exp()[:, None])]
    if name.endswith((".mamba.D", ".mixer.D")):
        return [(f"{at}.ssm_d", tensor[:, None])]
    if name.endswith("dt_bias"):
        return [(f"{at}.ssm_dt.bias", tensor)]
    if of_mixer and name.endswith("norm.weight"):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return [(f"{at}.ssm_norm.weight", tensor.view(groups, -1))]
    if name.endswith("conv1d.weight"):
        return [(f"{at}.ssm_conv1d.weight", tensor.squeeze(1))]
    if name.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if config.num_local_experts else ""
        both = zip(("gate", "up"), tensor.chunk(2), strict=True)
        return [(f"{at}.ffn_{one}{end}.weight", part) for one, part in both]
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return [(f"{at}.ffn_down.weight", tensor)]
    if name.endswith("block_sparse_moe.input_linear.weight"):
        both = zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True)
        return [(f"{at}.ffn_{one}_exps.weight", part) for one, part in both]
    return None


def _delta_net(architecture: str, config: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor of a delta net. Heads of values take turns over the heads of keys in `qwen35`."""
    keys, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    of_keys = 2 * keys * config.linear_key_head_dim

    def in_turns(x: Tensor) -> Tensor:
        """Rows of values, in the order of the file."""
        if architecture == "qwen3next":
            return x
        return x.view(keys, each, len(x) // keys // each, -1).transpose(0, 1).reshape(x.shape)

    if "in_proj_qkvz" in name:
        of_value = each * config.linear_value_head_dim
        sizes = [config.linear_key_head_dim] * 2 + [of_value] * 2
        q, k, v, z = (part.flatten(0, 1) for part in torch.split(tensor.view(keys, sum(sizes), -1), sizes, dim=1))
        yield name.replace("qkvz", "qkv"), torch.cat([q, k, v])
        yield name.replace("qkvz", "z"), z
    elif "in_proj_qkv" in name or "conv1d" in name:
        x = tensor.squeeze(1) if "conv1d" in name else tensor
        yield name, torch.cat([x[:of_keys], in_turns(x[of_keys:])])
    elif name.endswith("A_log"):
        yield name, in_turns(-tensor.exp())
    elif name.endswith("dt_bias"):
        yield name.replace("dt_bias", "dt_proj.bias"), in_turns(tensor)
    elif name.endswith("out_proj.weight"):
        yield name, in_turns(tensor.t()).t()
    elif "norm" in name or "in_proj_ba" in name:
        yield name, tensor
    else:
        yield name, in_turns(tensor)


def save(
    path: Path, model: Any, architecture: str, keys: dict[str, Any], kind: str = "F32", pieces: int = 1
) -> list[Path]:
    """Writes a model. keys: the architecture's own, without its name; kind: of matrices. Returns the files."""
    import gguf

    folder = path.parent / f"{path.stem}-hub"
    model.save_pretrained(folder)
    config = model.config
    known: Any = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    shape = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * config.hidden_size),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", 1e-5)),
    }
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-60 // pieces) if pieces > 1 else 0)
    put: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in (shape | keys).items():
        put[type(value)](f"{architecture}.{key}", value)
    writer.add_eos_token_id(2)
    for name, tensor in _as_converted(architecture, config, load_file(folder / "model.safetensors")):
        stem = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stem is not None, name
        numbers = tensor.float().contiguous().numpy()
        if kind != "F32" and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "norm" not in name:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stem, gguf.quants.quantize(numbers, number), raw_dtype=number)
        else:
            writer.add_tensor(stem, numbers.astype(np.float32))
    for name, factors in getattr(model, "factors", {}).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))
