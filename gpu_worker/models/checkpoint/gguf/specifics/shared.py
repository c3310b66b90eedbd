"""What the architectures' configurations have in common."""

from __future__ import annotations

from typing import Any

from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata

Config = dict[str, Any]
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
_POOLING = {1: "mean", 2: "first", 3: "last"}
SIGMOID = 2


def kinds_of_layers(metadata: Metadata, n: int, every: int) -> list[str]:
    """The kinds of layers. every: of this many layers the last one attends to all, unless the file says
    otherwise."""
    pattern = metadata.get("attention.sliding_window_pattern", every)
    if type(pattern) is int and pattern >= 0:
        return [SLIDING if pattern and (i + 1) % pattern else FULL for i in range(n)]
    if not isinstance(pattern, list) or len(pattern) != n:
        limit = f"be a whole number, or say of each of {n} layers whether it has a window"
        raise metadata.wrong("attention.sliding_window_pattern", limit, shown(pattern))
    return [SLIDING if local else FULL for local in pattern]


def chosen(metadata: Metadata) -> Config:
    return {"num_experts_per_tok": metadata.whole("expert_used_count")}


def sigmoid_routing(metadata: Metadata) -> Config:
    if metadata.whole("expert_gating_func", SIGMOID, low=0) != SIGMOID:
        raise metadata.wrong("expert_gating_func", f"be {SIGMOID}, sigmoid", metadata.get("expert_gating_func"))
    return {
        **chosen(metadata),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def plain_rotation(common: Config) -> Config:
    """What a file without `rope.scaling` says. The default of the class is another."""
    return {"rope_type": "default", "rope_theta": common["rope_theta"]}


def has(metadata: Metadata, part: str) -> bool:
    """Whether some layer has this tensor."""
    return any(name.endswith(f".{part}") for name in metadata.header.tensors)


def layer_norm(metadata: Metadata, default: float) -> float:
    return metadata.number("attention.layer_norm_epsilon", default)


def pooling(metadata: Metadata) -> str:
    kind = metadata.whole("pooling_type", 1)
    if kind not in _POOLING:
        raise metadata.wrong("pooling_type", f"be one of {sorted(_POOLING)}", kind)
    return _POOLING[kind]
