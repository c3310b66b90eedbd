"""The weights of one layer, part by part as in its plan (`plan.Layer`), and of a head that drafts with one.

The head makes, of what the model makes of a token and of the token after it, the token after that:

    t_p ───► layers of the model ──► h_p ──norm──┐
    t_p+1 ──► embedding ──────────────────norm───┴─ join ──► layer ──► norm ──► d_p ──► head ──► t_p+2

h_p is behind the model's last norm. The layer's keys and values of position p lie where the model's do. A chain of
drafts goes on with d_p in the place of h_p+1. Embedding and output head are the model's. This is the head of
Qwen3.5, as its checkpoints store it (`mtp.*`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.attention import AttentionWeights
from petiole.gpu_worker.models.parts.experts import ExpertWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.parts.per_layer import PerLayerWeights
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.mixing import RecurrentWeights
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.weights.linear import Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """scalar: [1]."""

    mixer: AttentionWeights | RecurrentWeights
    feed_forward: FeedForwardWeights | None
    mixer_norm: NormWeights | None = None
    mixer_out_norm: NormWeights | None = None
    feed_forward_norm: NormWeights | None = None
    feed_forward_out_norm: NormWeights | None = None
    scalar: Tensor | None = None
    per_layer: PerLayerWeights | None = None
    experts: ExpertWeights | None = None

    @property
    def linears(self) -> Iterator[Linear]:
        """The linear layers, without the router of experts."""
        mixer, fed, experts, per_layer = self.mixer, self.feed_forward, self.experts, self.per_layer
        yield from (mixer.first, mixer.out)
        if isinstance(mixer, DeltaNetWeights):
            yield mixer.gates
        if isinstance(mixer, AttentionWeights) and mixer.latent is not None:
            latent = mixer.latent
            yield from (latent.keys, latent.values, *([latent.queries] if latent.queries else []))
        if fed is not None:
            yield from (fed.gate_up, fed.down)
        if experts is not None:
            yield from (experts.gate_up.whole, experts.down.whole)
        if per_layer is not None:
            yield from (per_layer.gate, per_layer.out)

    @property
    def attention(self) -> AttentionWeights:
        """As in the plan."""
        assert isinstance(self.mixer, AttentionWeights)
        return self.mixer

    @property
    def dense(self) -> FeedForwardWeights:
        """As in the plan."""
        assert self.feed_forward is not None
        return self.feed_forward


@dataclass(frozen=True, slots=True)
class DraftingWeights:
    """join: 2 * hidden -> hidden, of the token and what is known before it. norm: behind the layer. table: of its
    rotation."""

    layer: LayerWeights
    join: Linear
    token_norm: NormWeights
    hidden_norm: NormWeights
    norm: NormWeights
    table: Tensor | None

    def joined(self, plan: Norm, embedded: Tensor, known: Tensor, kernels: Kernels) -> Tensor:
        """The inputs of the layer, [T, hidden]. embedded: the tokens after the positions, [T, hidden]; known: what
        the model has made of the positions, behind its last norm, [T, hidden]."""
        token = normed(plan, self.token_norm, embedded, kernels)
        before = normed(plan, self.hidden_norm, known, kernels)
        return self.join(torch.cat([token, before], dim=-1))
