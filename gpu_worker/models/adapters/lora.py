"""LoRA adapters: read from PEFT's format, held in device slots, and applied to batches that mix adapters:

    y[t] += B[slot(t)] · (A[slot(t)] · x[t])          slot 0 is "no adapter" and stays zero

A fused linear map has one A for all its parts, stacked, and one B for each part. The scale is folded into B, and
ranks below the bank's are padded with zeros, so that all slots have the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petiole.gpu_worker.errors import AdapterError, ModelError
from petiole.gpu_worker.models.checkpoint.safetensors import SafetensorsFile
from petiole.gpu_worker.models.config import ModelConfig, read_json
from petiole.gpu_worker.models.decoder import LinearName

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_PARTS: dict[LinearName, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_PLACE = {part: (name, i) for name, parts in _PARTS.items() for i, part in enumerate(parts)}
_TENSOR = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight$")
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "alora_invocation_tokens",
)
_MAX_ALPHA = 1e30
_ALIGNED = 64
"""Each tensor begins at a multiple of this many elements."""

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations (`init_lora_weights`) that also change the weights that the adapter is added to."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """weights[layer, part]: (A [r, in], B [out, r] with the scale in it). All are views of `flat`, which is copied
    to the device in one piece."""

    name: str
    rank: int
    weights: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    flat: Tensor


def part_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each projection that an adapter can modify."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q_proj": (config.q_size, hidden),
        "k_proj": (config.kv_size, hidden),
        "v_proj": (config.kv_size, hidden),
        "o_proj": (hidden, config.q_size),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def rank_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a slot per rank."""
    return itemsize * config.n_layers * sum(outputs + inputs for outputs, inputs in part_sizes(config).values())


def read_adapter(
    name: str,
    folder: Path,
    config: ModelConfig,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    pinned: bool = False,
) -> Adapter:
    """Read a PEFT adapter from its folder, into memory that CUDA copies from if `pinned`. Raises AdapterError."""
    settings, weights = ADAPTER_FILES
    try:
        rank, scale = _rank_and_scale(name, read_json(folder / settings), max_rank)
        file = SafetensorsFile(folder / weights, mapped=False)  # it may be overwritten at any time
        found = _read_weights(name, file, config, rank, scale)
        return Adapter(name, rank, *_packed(found, dtype, pinned))
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(f"adapter {name}: {error}") from error


def _rank_and_scale(name: str, raw: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    if str(raw.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"adapter {name}: peft_type must be LORA, got {raw['peft_type']}")
    used = [key for key in _UNSUPPORTED if raw.get(key)]
    if used or str(raw.get("bias", "none")) != "none":
        raise AdapterError(f"adapter {name}: {', '.join(used) or 'bias'} is not supported")
    start = str(raw.get("init_lora_weights")).lower()
    if start.startswith(_CHANGE_BASE):
        raise AdapterError(
            f"adapter {name}: init_lora_weights {start} changes the base weights; save it converted to plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha", raw.get("r"))
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise AdapterError(f"adapter {name}: r must be a whole number, got {rank!r}")
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not abs(alpha) <= _MAX_ALPHA:
        raise AdapterError(
            f"adapter {name}: lora_alpha must be a number to {_MAX_ALPHA:g}, got {str(alpha)[:100]}"
        )
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"adapter {name}: rank must be 1 to {max_rank} (lora_max_rank), got {rank}")
    return rank, alpha / (rank**0.5 if raw.get("use_rslora") else rank)


def _read_weights(
    name: str, file: SafetensorsFile, config: ModelConfig, rank: int, scale: float
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    sizes = part_sizes(config)
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key in file.entries:
        match = _TENSOR.match(key)
        if match is None or match[2] not in sizes or int(match[1]) >= config.n_layers:
            raise AdapterError(f"adapter {name}: {key} fits nothing in this model (known: {', '.join(sizes)})")
        outputs, inputs = sizes[match[2]]
        expected = (rank, inputs) if match[3] == "A" else (outputs, rank)
        tensor = file.tensor(key).float().clone()
        if tuple(tensor.shape) != expected:
            raise AdapterError(f"adapter {name}: {key} must have shape {list(expected)}, got {list(tensor.shape)}")
        found.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    halves = [place for place, pair in found.items() if len(pair) != 2]
    if halves or not found:
        raise AdapterError(f"adapter {name}: lora_A or lora_B is missing for {halves or 'every layer'}")
    weights = {place: (pair["A"], pair["B"] * scale) for place, pair in found.items()}
    for (layer, part), pair in weights.items():
        if not all(bool(torch.isfinite(tensor).all()) for tensor in pair):
            raise AdapterError(f"adapter {name}: {part} of layer {layer} must have finite numbers, got inf or NaN")
    return weights


def _packed(
    weights: Mapping[tuple[int, str], tuple[Tensor, Tensor]], dtype: torch.dtype, pinned: bool
) -> tuple[dict[tuple[int, str], tuple[Tensor, Tensor]], Tensor]:
    """`Adapter.weights` and `Adapter.flat`, in another type."""
    sizes = [-(-tensor.numel() // _ALIGNED) * _ALIGNED for pair in weights.values() for tensor in pair]
    flat = torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned)
    pieces = iter(torch.split(flat, sizes))

    def put(tensor: Tensor) -> Tensor:
        piece: Tensor = next(pieces)[: tensor.numel()].view(tensor.shape)
        return piece.copy_(tensor)

    return {place: (put(a), put(b)) for place, (a, b) in weights.items()}, flat


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """The adapter slots of one linear layer. a: [slots, parts * rank, in]; b[part]: [slots, out, rank]."""

    a: Tensor
    b: tuple[Tensor, ...]


class AdapterBank:
    """The adapter slots of the device. ranks: int32 [slots] on the device, the rank of each slot's adapter."""

    def __init__(
        self, config: ModelConfig, n_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.n_slots, self.max_rank = config, n_slots, max_rank
        self.dtype, self.device = dtype, device
        sizes = part_sizes(config)

        def new(parts: Sequence[str]) -> AdapterSlots:
            rows = n_slots + 1
            a = torch.zeros((rows, len(parts) * max_rank, sizes[parts[0]][1]), dtype=dtype, device=device)
            b = (torch.zeros((rows, sizes[p][0], max_rank), dtype=dtype, device=device) for p in parts)
            return AdapterSlots(a, tuple(b))

        self._slots = {(i, name): new(parts) for i in range(config.n_layers) for name, parts in _PARTS.items()}
        self._ranks = [0] * (n_slots + 1)
        self.ranks = torch.zeros(n_slots + 1, dtype=torch.int32, device=device)
        self._versions = [0] * (n_slots + 1)

    def put(self, adapter: Adapter, slot: int) -> None:
        """Replace the adapter in a slot. Called in stream order, because earlier steps still use the old one.
        Makes one copy to the device, which then spreads the parts over the layers. Nothing waits for the copy."""
        r, most = adapter.rank, self.max_rank
        flat = adapter.flat.to(self.device, non_blocking=True)
        self._ranks[slot] = r
        self.ranks[slot] = r
        self._versions[slot] += 1
        targets, sources = list[Tensor](), list[Tensor]()
        for (layer, part), pair in adapter.weights.items():
            name, i = _PLACE[part]
            slots = self._slots[layer, name]
            targets += slots.a[slot, i * most : i * most + r], slots.b[i][slot, :, :r]
            sources += (flat.as_strided(t.shape, t.stride(), t.storage_offset()) for t in pair)
        torch._foreach_zero_([t[slot] for slots in self._slots.values() for t in (slots.a, *slots.b)])
        torch._foreach_copy_(targets, sources)

    def slots(self, layer: int, name: LinearName) -> AdapterSlots:
        return self._slots[layer, name]

    def version(self, slot: int) -> int:
        """The number of `put` calls for this slot."""
        return self._versions[slot]

    def matrices(self, layer: int, name: LinearName, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """A [rank, in] and B [out, rank] of each part, at the adapter's own rank."""
        slots, rank = self._slots[layer, name], self._ranks[slot]
        return [a[:rank] for a in torch.split(slots.a[slot], self.max_rank)], [b[slot, :, :rank] for b in slots.b]
