"""LoRA adapters: read from PEFT's format, held in device slots, applied to mixed batches.

    y[t] += B[slot(t)] · (A[slot(t)] · x[t])          slot 0 is "no adapter" and stays zero

A fused linear map has one A for all its parts, stacked, and one B for each part. The scale is folded into B, and
ranks below the bank's are padded with zeros, so that a slot's shape does not depend on what lies in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.errors import AdapterError, ModelError
from gpu_worker.models.config import ModelConfig, read_json
from gpu_worker.models.decoder import LinearName
from gpu_worker.models.safetensors import SafetensorsFile
from gpu_worker.runtime.device import upload

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

_PARTS: dict[LinearName, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
_PLACE = {part: (name, i) for name, parts in _PARTS.items() for i, part in enumerate(parts)}
_TENSOR = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight$")
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
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations (`init_lora_weights`) that also change the weights that the adapter is added to."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """weights[layer, part]: (A float32 [r, in], B float32 [out, r] with the scale in it)."""

    name: str
    rank: int
    weights: Mapping[tuple[int, str], tuple[Tensor, Tensor]]


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


def read_adapter(name: str, folder: Path, config: ModelConfig, max_rank: int) -> Adapter:
    """Read a PEFT adapter from its folder. Raises AdapterError."""
    settings, weights = ADAPTER_FILES
    try:
        rank, scale = _rank_and_scale(name, read_json(folder / settings), max_rank)
        file = SafetensorsFile(folder / weights, mapped=False)  # it may be overwritten at any time
        return Adapter(name, rank, _read_weights(name, file, config, rank, scale))
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
    if not isinstance(rank, int):
        raise AdapterError(f"adapter {name}: r must be a whole number, got {rank!r}")
    if not isinstance(alpha, int | float):
        raise AdapterError(f"adapter {name}: lora_alpha must be a number, got {alpha!r}")
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
    return {place: (pair["A"], pair["B"] * scale) for place, pair in found.items()}


@dataclass(frozen=True, slots=True)
class _Slots:
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

        def new(parts: Sequence[str]) -> _Slots:
            rows = n_slots + 1
            a = torch.zeros((rows, len(parts) * max_rank, sizes[parts[0]][1]), dtype=dtype, device=device)
            b = (torch.zeros((rows, sizes[p][0], max_rank), dtype=dtype, device=device) for p in parts)
            return _Slots(a, tuple(b))

        self._slots = {(i, name): new(parts) for i in range(config.n_layers) for name, parts in _PARTS.items()}
        self._ranks = [0] * (n_slots + 1)
        self.ranks = torch.zeros(n_slots + 1, dtype=torch.int32, device=device)
        self._versions = [0] * (n_slots + 1)

    def put(self, adapter: Adapter, slot: int) -> None:
        """Replace the adapter in a slot. Called in stream order, because earlier steps still use the old one."""
        r, most = adapter.rank, self.max_rank
        self._ranks[slot] = r
        self.ranks[slot] = r
        self._versions[slot] += 1
        for slots in self._slots.values():
            for tensor in (slots.a, *slots.b):
                tensor[slot].zero_()
        for (layer, part), (a, b) in adapter.weights.items():
            name, i = _PLACE[part]
            slots = self._slots[layer, name]
            slots.a[slot, i * most : i * most + r].copy_(a)
            slots.b[i][slot, :, :r].copy_(b)

    def slots(self, layer: int, name: LinearName) -> _Slots:
        return self._slots[layer, name]

    def version(self, slot: int) -> int:
        """The number of `put` calls for this slot."""
        return self._versions[slot]

    def matrices(self, layer: int, name: LinearName, slot: int) -> tuple[list[Tensor], list[Tensor]]:
        """A [rank, in] and B [out, rank] of each part, at the adapter's own rank."""
        slots, rank = self._slots[layer, name], self._ranks[slot]
        return [a[:rank] for a in torch.split(slots.a[slot], self.max_rank)], [b[slot, :, :rank] for b in slots.b]


class GroupedDeltas:
    """The deltas of one step, grouped by adapter: one pair of products for all positions with the same adapter."""

    def __init__(self, bank: AdapterBank, adapter_slots: np.ndarray) -> None:
        self._bank = bank
        self._groups = [
            (int(slot), upload(np.flatnonzero(adapter_slots == slot), bank.device))
            for slot in np.unique(adapter_slots)
            if slot
        ]

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None:
        slots = self._bank.slots(layer, name)
        for slot, positions in self._groups:
            inner = x[positions].to(slots.a.dtype) @ slots.a[slot].T
            parts = [h @ b[slot].T for h, b in zip(inner.chunk(len(slots.b), dim=-1), slots.b, strict=True)]
            y.index_add_(0, positions, torch.cat(parts, dim=-1).to(y.dtype))


class CapturedDeltas:
    """The deltas of a decode step on CUDA, each position with its own adapter's matrices.

    It makes no decision on the host, so it can be captured in a graph. adapter_slots: int32 [T].
    """

    def __init__(self, bank: AdapterBank, adapter_slots: Tensor) -> None:
        self._bank = bank
        self._of = adapter_slots

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None:
        from gpu_worker.runtime.fused.adapters import add_deltas

        slots = self._bank.slots(layer, name)
        add_deltas(x, y, slots.a, slots.b, self._of, self._bank.ranks)
