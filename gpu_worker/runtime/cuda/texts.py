"""CUDA's forward of models whose texts are computed whole: encoders, and others whose positions are all pooled.

Norms, products and activations run over all positions of a step. Attention runs over its texts, padded to the
longest: the scheduler puts texts of like lengths together. No step is captured, and no keys are kept.

A text's last bits depend on what it was batched with, as everywhere on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.errors import MachineError
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.rotary import Rotation, rotated
from petiole.gpu_worker.models.plan import Attention, ModelPlan
from petiole.gpu_worker.request.images import PreparedImage
from petiole.gpu_worker.runtime.device.interface import upload
from petiole.gpu_worker.runtime.interface import VECTORS, Int32Array
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates
from petiole.gpu_worker.runtime.step.terms import GroupedTerms


def require_known(model: ModelPlan) -> None:
    """Raises MachineError for what is not computed here."""
    if model.keeps_states:
        raise MachineError(f"CUDA does not pool {model.architecture}, whose layers keep a state; device=cpu does")
    for mixer in model.attentions:
        if mixer.softcap or mixer.sinks:
            what = "caps its scores" if mixer.softcap else "has sinks"
            raise MachineError(f"CUDA does not pool {model.architecture}, whose attention {what}; device=cpu does")
    if model.pooling is not None and model.pooling.of_tokens:
        names = " and ".join(f"{name}_linear" for name in model.pooling.of_tokens)
        raise MachineError(f"CUDA makes nothing of single tokens ({names}); device=cpu does")


@dataclass(slots=True)
class TextsAttention:
    """The attention of a step of whole texts. index: int64 [B, longest], the step's position of each position of a
    text, and any after a text's end; back: int64 [T], the other way round; seen: bool [B, 1, 1, longest], None if
    all texts are equally long."""

    plan: Sequence[Attention]
    index: Tensor
    back: Tensor
    seen: Tensor | None
    _masks: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Sequence[Attention], lengths: Int32Array, place: torch.device) -> TextsAttention:
        longest, first = int(lengths.max()), np.cumsum(lengths) - lengths
        within = np.arange(longest)[None, :]
        seen = within < lengths[:, None]
        index = np.where(seen, first[:, None] + within, 0).astype(np.int64)
        back = np.flatnonzero(seen).astype(np.int64)
        mask = None if bool(seen.all()) else upload(seen[:, None, None, :], place)
        return cls(plan, upload(index, place), upload(back, place), mask)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
    ) -> Tensor:
        plan = self.plan[layer]
        q, k = rotated(q, k, rotation)
        assert k is not None, "a text's layers have keys of their own"
        assert v is not None, "a text's layers have values of their own"
        q, k, v = (x[self.index].transpose(1, 2) for x in (q, k, v))
        if plan.heads != plan.kv_heads:
            k, v = (x.repeat_interleave(plan.heads // plan.kv_heads, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(plan), scale=plan.scale)
        return out.transpose(1, 2).reshape(self.index.numel(), -1)[self.back]

    def _mask(self, plan: Attention) -> Tensor | None:
        """bool, for [B, heads, longest, longest]; None: every position sees all."""
        key = plan.mask, plan.window
        if key not in self._masks:
            around = self._around(plan)
            parts = [mask for mask in (self.seen, around) if mask is not None]
            self._masks[key] = None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]
        return self._masks[key]

    def _around(self, plan: Attention) -> Tensor | None:
        """bool [longest, longest]: what a position sees of a text. Nobody reads the positions behind a text's end,
        which may see nothing."""
        causal = plan.mask != "bidirectional"
        if not causal and not plan.window:
            return None
        at = torch.arange(self.index.shape[1], device=self.index.device)
        behind = at[:, None] - at[None, :]
        mask = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        return mask & (behind.abs() < plan.window) if plan.window else mask


class CudaTextExecutor:
    """Vectors or scores of whole texts. See `platform.Executor`."""

    kernels = "torch"

    def __init__(self, decoder: Decoder, bank: AdapterBank | None, place: torch.device) -> None:
        self._decoder, self._bank, self._place = decoder, bank, place

    @property
    def instructions(self) -> str:
        if self._place.type != "cuda":
            return ""
        major, minor = torch.cuda.get_device_capability(self._place)
        return f"sm_{major}{minor}"

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        decoder, place = self._decoder, self._place
        token_ids, positions = (upload(one, place) for one in (inputs.token_ids, inputs.positions))
        types = None if inputs.types is None else upload(inputs.types, place)
        attention = TextsAttention.of(decoder.plan.attentions, inputs.lengths, place)
        terms = None
        if self._bank is not None and inputs.adapters.any():
            terms = GroupedTerms(self._bank, np.repeat(inputs.adapters, inputs.lengths))
        hidden = decoder.forward(
            decoder.embed(token_ids), Forward(positions, attention, terms, token_ids=token_ids, types=types)
        )
        vectors = decoder.vectors(hidden, inputs.lengths.tolist())
        return StepStates(lambda: torch.zeros(len(vectors), 1, device=place), {VECTORS: lambda _: vectors})

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        raise AssertionError("a model of texts has no images")
