"""The weights of one layer, part by part as in its plan (`plan.Layer`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petiole.gpu_worker.models.parts.attention import AttentionWeights
from petiole.gpu_worker.models.parts.experts import ExpertWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.per_layer import PerLayerWeights
from petiole.gpu_worker.models.parts.recurrent.mixing import RecurrentWeights


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
    def attention(self) -> AttentionWeights:
        """As in the plan."""
        assert isinstance(self.mixer, AttentionWeights)
        return self.mixer

    @property
    def dense(self) -> FeedForwardWeights:
        """As in the plan."""
        assert self.feed_forward is not None
        return self.feed_forward
