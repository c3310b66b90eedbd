"""CUDA's forward of models whose texts are computed whole: encoders, and others whose positions are all pooled.

Norms, products and activations run over all positions of a step. Attention runs over texts of like lengths
together, padded to the longest of them: so one long text beside many short ones takes no memory for each of these.
No step is captured, and no keys are kept.

A text's last bits depend on what it was batched with, as everywhere on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.rotary import Rotation, rotated
from petiole.gpu_worker.models.plan import Attention, ModelPlan
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.runtime.device.cuda import architecture
from petiole.gpu_worker.runtime.device.device import upload
from petiole.gpu_worker.runtime.interface import VECTORS, Int32Array, Int64Array
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates
from petiole.gpu_worker.runtime.step.terms import GroupedTerms


def require_supported(model: ModelPlan) -> None:
    """Raises MachineError for what is not computed here."""
    if model.keeps_states:
        raise MachineError(f"CUDA does not pool {model.architecture}, whose layers keep a state; device=cpu does")
    for mixer in model.attentions:
        if mixer.softcap or mixer.sinks:
            what = "caps its scores" if mixer.softcap else "has sinks"
            raise MachineError(f"CUDA does not pool {model.architecture}, whose attention {what}; device=cpu does")
        if mixer.latent is not None:
            what = "reads latents"
            raise MachineError(f"CUDA does not pool {model.architecture}, whose attention {what}; device=cpu does")
        if mixer.keys_of is not None:
            what = f"reads the keys of layer {mixer.keys_of}"
            raise MachineError(f"CUDA does not pool {model.architecture}, whose attention {what}; device=cpu does")
    if model.pooling is not None and model.pooling.of_tokens:
        names = " and ".join(f"{name}_linear" for name in model.pooling.of_tokens)
        raise MachineError(f"CUDA makes nothing of single tokens ({names}); device=cpu does")


SHORT = 32
"""Texts of at most this many tokens are alike."""


def mask_bytes(model: ModelPlan, tokens: int, longest: int, itemsize: int) -> int:
    """The most bytes of what positions see in a step of `tokens`: booleans, and what is added to scores in their
    place. The padded texts have at most twice their positions."""
    if not model.whole_texts:
        return 0
    kinds = {(mixer.mask, mixer.window) for mixer in model.attentions}
    squares = sum(mask != "bidirectional" or window > 0 for mask, window in kinds)
    most = max(2 * tokens * min(longest, tokens), tokens * SHORT**2)
    by_distance = max((3 * mixer.heads * itemsize for mixer in model.attentions if mixer.distances), default=0)
    return (squares * (1 + itemsize) + by_distance) * most


@dataclass(frozen=True, slots=True)
class PaddedTexts:
    """Texts that are padded to one length: at most twice their own, or `SHORT`. index: int64 [B, longest], the
    step's position of each position of a text, and the text's first after its end; back: int64 [n], where the
    texts' own positions lie in `index`; seen: bool [B, 1, 1, longest], None if all texts are equally long."""

    index: Tensor
    back: Tensor
    seen: Tensor | None
    masks: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)

    @classmethod
    def of(cls, first: Int64Array, lengths: Int32Array, place: torch.device) -> PaddedTexts:
        within = np.arange(int(lengths.max()))[None, :]
        seen = within < lengths[:, None]
        index = (first[:, None] + np.where(seen, within, 0)).astype(np.int64)
        mask = None if bool(seen.all()) else upload(seen[:, None, None, :], place)
        return cls(upload(index, place), upload(np.flatnonzero(seen).astype(np.int64), place), mask)

    def attend(
        self, plan: Attention, q: Tensor, k: Tensor, v: Tensor, distances: Distances | None = None
    ) -> Tensor:
        """[n, q_size]. q, k, v: of the whole step, rotated."""
        q, k, v = (x[self.index].transpose(1, 2) for x in (q, k, v))
        if plan.heads != plan.kv_heads:
            k, v = (x.repeat_interleave(plan.heads // plan.kv_heads, 1) for x in (k, v))
        mask = self._mask(plan)
        if distances is not None:
            added = distances.added(q, k, plan.scale)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=plan.scale)
        return out.transpose(1, 2).reshape(self.index.numel(), -1)[self.back]

    def _mask(self, plan: Attention) -> Tensor | None:
        """bool, for [B, heads, longest, longest]; None: every position sees all."""
        key = plan.mask, plan.window
        if key not in self.masks:
            parts = [mask for mask in (self.seen, self._around(plan)) if mask is not None]
            self.masks[key] = None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]
        return self.masks[key]

    def _around(self, plan: Attention) -> Tensor | None:
        """bool [longest, longest]: what a position sees of a text. Nobody reads the positions after a text's end,
        which may see nothing."""
        causal = plan.mask != "bidirectional"
        if not causal and not plan.window:
            return None
        at = torch.arange(self.index.shape[1], device=self.index.device)
        behind = at[:, None] - at[None, :]
        mask = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
        return mask & (behind.abs() < plan.window) if plan.window else mask


@dataclass(frozen=True, slots=True)
class TextsAttention:
    """The attention of a step of whole texts. order: int64 [T], where each position of the step lies among the
    groups' own, one group after the other; None: there is one group."""

    plan: Sequence[Attention]
    groups: Sequence[PaddedTexts]
    order: Tensor | None

    @classmethod
    def of(cls, plan: Sequence[Attention], lengths: Int32Array, place: torch.device) -> TextsAttention:
        first, doublings = np.cumsum(lengths) - lengths, np.ceil(np.log2(np.maximum(lengths, SHORT)))
        texts = [np.flatnonzero(doublings == one) for one in np.unique(doublings)]
        groups = [PaddedTexts.of(first[some], lengths[some], place) for some in texts]
        if len(groups) == 1:
            return cls(plan, groups, None)
        own = np.concatenate(texts)
        return cls(plan, groups, upload(np.argsort(ragged_arange(first[own], lengths[own])), place))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
        distances: Distances | None = None,
    ) -> Tensor:
        plan = self.plan[layer]
        q, k = rotated(q, k, rotation)
        assert k is not None, "a text's layers have keys of their own"
        assert v is not None, "a text's layers have values of their own"
        found = [group.attend(plan, q, k, v, distances) for group in self.groups]
        return found[0] if self.order is None else torch.cat(found)[self.order]


class CudaTextExecutor:
    """Vectors or scores of whole texts. See `platform.Executor`."""

    kernels = "torch"

    def __init__(self, decoder: Decoder, bank: AdapterBank | None, place: torch.device) -> None:
        self._decoder, self._bank, self._place = decoder, bank, place

    @property
    def instructions(self) -> str:
        return architecture(self._place)

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
        vectors = decoder.vectors(hidden, inputs.lengths.tolist(), inputs.unpooled)
        return StepStates(lambda: torch.zeros(len(vectors), 1, device=place), {VECTORS: lambda _: vectors})

    def catch_up(self) -> None:
        """Nothing is owed."""

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        raise AssertionError("a model of texts has no images")
