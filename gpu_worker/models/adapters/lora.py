"""LoRA adapters: read from PEFT's format, held in device slots, and applied to batches that mix adapters:

    y[t] += B[slot(t)] · (A[slot(t)] · x[t])          slot 0 is "no adapter" and stays zero

A fused linear map has one A for all its parts, stacked, and one B for each part. The scale is folded into B, and
ranks below the bank's are padded with zeros, so that all slots have the same shape.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import AdapterError, ModelError
from petiole.gpu_worker.models.adapters.files import ADAPTER_FILES
from petiole.gpu_worker.models.checkpoint.configuration import read_json, shown
from petiole.gpu_worker.models.checkpoint.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.names import LINEARS, LLAMA, LinearName, Names

_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight$")
_WRAPPERS = re.compile(r"^(?:base_model\.model\.)*")
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
)
_MAX_ALPHA = 1e30
_MAX_SETTINGS = 2**20
"""Bytes of adapter_config.json. A worker reads it while it serves."""
_ALIGNED = 64
"""Each tensor begins at a multiple of this many elements."""

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations (`init_lora_weights`) that also change the weights that the adapter is added to."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A part of one of a layer's products: for example, of "qkv" part 1 are the keys."""

    layer: int
    linear: LinearName
    part: int


Pairs = Mapping[LoraTarget, tuple[Tensor, Tensor]]
"""A [r, in] and B [out, r], with the scale in it."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """All weights are views of `flat`, which is copied to the device in one piece."""

    name: str
    rank: int
    weights: Pairs
    flat: Tensor


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A layer as the checkpoint has it: the parts of a product that lie in it, one after the other."""

    layer: int
    linear: LinearName
    parts: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: int


class AdaptedModel:
    """What adapters can change in a model, and under which names."""

    def __init__(self, plan: ModelPlan, names: Names = LLAMA) -> None:
        self.plan, self._names = plan, names
        self._stored: dict[str, StoredPart] = {}
        for i, (layer, places) in enumerate(zip(plan.layers, names.places(plan), strict=True)):
            for linear, stored in names.linears(layer, plan.hidden_size):
                at = places[linear in ("gate_up", "down")]
                together = len(stored.names) < len(stored.parts)
                for k, name in enumerate(stored.names):
                    parts = tuple(range(len(stored.parts))) if together else (k,)
                    outputs = tuple(stored.parts[part] for part in parts)
                    self._stored[at + name] = StoredPart(i, linear, parts, outputs, stored.inputs)

    @property
    def known(self) -> str:
        """For messages."""
        return ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in self._stored))

    def find(self, module: str) -> StoredPart | None:
        """The layer of this path in an adapter's file. Paths of other parts, such as an encoder's, fit nothing."""
        path = _WRAPPERS.sub("", module)
        for prefix in sorted({"", "model.", *self._names.prefixes}, key=len, reverse=True):
            if path.startswith(prefix) and path[len(prefix) :] in self._stored:
                return self._stored[path[len(prefix) :]]
        return None

    def sizes(self, layer: int, linear: LinearName) -> tuple[tuple[int, ...], int]:
        """The outputs of each part, and the inputs. A layer without the product has no parts."""
        stored = self._names.stored(linear, self.plan.layers[layer], self.plan.hidden_size)
        return ((), 0) if stored is None else (stored.parts, stored.inputs)

    def rank_bytes(self, itemsize: int) -> int:
        """Bytes of a slot per rank."""
        sizes = (self.sizes(i, linear) for i in range(self.plan.n_layers) for linear in LINEARS)
        return itemsize * sum(sum(parts) + len(parts) * inputs for parts, inputs in sizes)

    def most_bytes(self, max_rank: int) -> int:
        """The most bytes that an adapter's file may have, in the widest type."""
        return max_rank * self.rank_bytes(torch.float64.itemsize) + MAX_HEADER_BYTES


def read_adapter(
    name: str,
    folder: Path,
    model: AdaptedModel,
    max_rank: int,
    dtype: torch.dtype = torch.float32,
    pinned: bool = False,
) -> Adapter:
    """Read a PEFT adapter from its folder, into memory that CUDA copies from if `pinned`. Raises AdapterError."""
    settings, weights = ADAPTER_FILES
    try:
        raw = read_json(folder / settings, _MAX_SETTINGS)
        rank, scale = _rank_and_scale(name, raw, max_rank)
        most = model.most_bytes(max_rank)
        file = SafetensorsFile(folder / weights, mapped=False, most=most)  # it may be overwritten at any time
        _check_patterns(name, raw, [match[1] for match in map(_TENSOR.match, file.entries) if match])
        found = _read_weights(name, file, model, rank, scale)
        return Adapter(name, rank, *_packed(found, dtype, pinned))
    except AdapterError:
        raise
    except ModelError as error:
        raise AdapterError(f"adapter {name}: {error}") from error


def _rank_and_scale(name: str, raw: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    if str(raw.get("peft_type", "LORA")).upper() != "LORA":
        raise AdapterError(f"adapter {name}: peft_type must be LORA")
    used = [key for key in _UNSUPPORTED if raw.get(key)]
    if used or str(raw.get("bias", "none")) != "none":
        raise AdapterError(f"adapter {name}: {', '.join(used) or 'bias'} is not supported")
    start = next((one for one in _CHANGE_BASE if str(raw.get("init_lora_weights")).lower().startswith(one)), None)
    if start is not None:
        raise AdapterError(
            f"adapter {name}: init_lora_weights {start} changes the base weights; save it converted to plain LoRA "
            "(path_initial_model_for_weight_conversion)"
        )
    rank, alpha = raw.get("r"), raw.get("lora_alpha", raw.get("r"))
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise AdapterError(f"adapter {name}: r must be a whole number")
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not abs(alpha) <= _MAX_ALPHA:
        raise AdapterError(f"adapter {name}: lora_alpha must be a number to {_MAX_ALPHA:g}")
    if not 1 <= rank <= max_rank:
        raise AdapterError(f"adapter {name}: rank must be 1 to {max_rank} (lora_max_rank), got {rank}")
    return rank, alpha / (rank**0.5 if raw.get("use_rslora") else rank)


def _check_patterns(name: str, raw: Mapping[str, Any], modules: Sequence[str]) -> None:
    """Ranks and scales of single modules are refused, if they are those of a module that the adapter changes. PEFT
    writes some for experts into every adapter of a mixture. A pattern is read as the end of a name; one that says
    more is taken for a match."""
    ends = sorted(module[::-1] for module in modules)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = raw.get(key) or {}
        if not isinstance(patterns, Mapping):
            raise AdapterError(f"adapter {name}: {key} must be numbers by pattern, got {shown(patterns)}")
        for pattern in patterns:
            end = str(pattern).removeprefix("^").removeprefix(".*").removeprefix("\\.").removesuffix("$")
            plain = end.replace("\\.", ".")
            at = bisect_left(ends, plain[::-1])
            if not re.fullmatch(r"[\w.]+", plain) or "".join(ends[at : at + 1]).startswith(plain[::-1]):
                raise AdapterError(f"adapter {name}: {key} is not supported")


def _read_weights(
    name: str, file: SafetensorsFile, model: AdaptedModel, rank: int, scale: float
) -> dict[LoraTarget, tuple[Tensor, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    stored: dict[str, StoredPart] = {}
    for key in file.entries:
        match = _TENSOR.match(key)
        if match is None:  # its name may be anything
            raise AdapterError(f"adapter {name}: a tensor is no lora_A.weight and no lora_B.weight")
        place = model.find(match[1])
        if place is None and ".experts" in key:
            raise AdapterError(
                f"adapter {name}: {shown(key)} changes experts, which adapters cannot (known: {model.known})"
            )
        if place is None:
            raise AdapterError(f"adapter {name}: {shown(key)} fits nothing in this model (known: {model.known})")
        expected = (rank, place.inputs) if match[2] == "A" else (sum(place.outputs), rank)
        if (shape := file.entries[key].shape) != expected:
            raise AdapterError(f"adapter {name}: {shown(key)} must have shape {list(expected)}, got {list(shape)}")
        found.setdefault(match[1], {})[match[2]] = file.tensor(key).float().clone()
        stored[match[1]] = place
    halves = [module for module, pair in found.items() if len(pair) != 2]
    if halves or not found:
        lacking = shown(halves) if halves else "every layer"
        raise AdapterError(f"adapter {name}: lora_A or lora_B is missing for {lacking}")
    weights: dict[LoraTarget, tuple[Tensor, Tensor]] = {}
    for module, pair in found.items():
        place, what = stored[module], f"{module.rpartition('.')[2]} of layer {stored[module].layer}"
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (pair["A"], pair["B"] * scale)):
            raise AdapterError(f"adapter {name}: {what} must have finite numbers, got inf or NaN")
        of_parts = torch.split(pair["B"] * scale, list(place.outputs))
        for part, b in zip(place.parts, of_parts, strict=True):
            weights[LoraTarget(place.layer, place.linear, part)] = (pair["A"], b)
    return weights


def _packed(
    weights: Pairs, dtype: torch.dtype, pinned: bool
) -> tuple[dict[LoraTarget, tuple[Tensor, Tensor]], Tensor]:
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
        self, model: AdaptedModel, n_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_layers = model.plan.n_layers
        self.n_slots, self.max_rank, self.dtype, self.device = n_slots, max_rank, dtype, device

        def new(parts: Sequence[int], inputs: int) -> AdapterSlots:
            rows = n_slots + 1
            a = torch.zeros((rows, len(parts) * max_rank, inputs), dtype=dtype, device=device)
            b = (torch.zeros((rows, outputs, max_rank), dtype=dtype, device=device) for outputs in parts)
            return AdapterSlots(a, tuple(b))

        self._slots = {
            (i, linear): new(*model.sizes(i, linear)) for i in range(self.n_layers) for linear in LINEARS
        }
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
        for place, pair in adapter.weights.items():
            slots, i = self._slots[place.layer, place.linear], place.part
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
