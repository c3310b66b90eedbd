"""`Drafting`: what the layer that drafts has beside a layer's weights, and the join that makes its inputs."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.layer import DraftingWeights
from petiole.gpu_worker.models.weights.host_memory import new_tensor
from petiole.gpu_worker.runtime.cpu.head import Floats
from petiole.gpu_worker.runtime.cpu.native.layers.model import ModelStruct, NormStruct, StepStruct
from petiole.gpu_worker.runtime.cpu.native.layers.structures import EmbeddingAndHead, Structures
from petiole.gpu_worker.runtime.cpu.native.products.weights import LinearStruct
from petiole.gpu_worker.runtime.interface import Int64Array

HELD = 2**22
"""Multiply-adds of a run that does not let go of the interpreter, in less than a tenth of a millisecond: the
engine's thread would take it, and give it back late."""


@dataclass
class Drafting:
    """norm: behind the layer that drafts; last_norm: behind the others. of_layers, of_chain: the two norms of what
    these, or it, have made. room: memory for `most` inputs, and from `scratch` on `stride` bytes for each of
    `n_threads`."""

    library: ctypes.CDLL
    quickly: ctypes.PyDLL
    """The same, for calls that do not let go of the interpreter."""
    join: LinearStruct
    token_norm: NormStruct
    norm: NormStruct
    last_norm: NormStruct
    of_layers: ctypes.Array[NormStruct]
    of_chain: ctypes.Array[NormStruct]
    room: Tensor
    most: int = 0
    n_threads: int = 0
    scratch: int = 0
    stride: int = 0

    @classmethod
    def of(
        cls, library: ctypes.CDLL, structures: Structures, ends: EmbeddingAndHead, weights: DraftingWeights
    ) -> Drafting:
        norms = weights.token_norm, weights.hidden_norm, weights.norm, ends.norm_weights
        token, known, own, last = (structures.norm(ends.norm, one) for one in norms)
        pair = NormStruct * 2
        quickly = ctypes.PyDLL(library._name, handle=library._handle)
        library.petiole_join_scratch.restype = quickly.petiole_cost.restype = c_int64
        return cls(
            library=library,
            quickly=quickly,
            join=structures.linear(weights.join),
            token_norm=token,
            norm=own,
            last_norm=last,
            of_layers=pair(last, known),
            of_chain=pair(own, known),
            room=torch.empty(0),
        )

    def joined(
        self, model: ModelStruct, step: StepStruct, known: Floats, token_ids: Int64Array | None, *, chained: bool
    ) -> ctypes.CDLL | ctypes.PyDLL:
        """Make the inputs of the layer in a step's `hidden`. model: this layer alone. known: [t, hidden], what the
        other layers have made of the inputs; chained: what this one has. token_ids: [t], the token behind each;
        None: their embeddings are there already. Returns the library that is to compute the step."""
        join, t = self.join, int(step.t)
        cost = self.quickly.petiole_cost(ctypes.byref(model), ctypes.byref(step)) + t * join.n * join.k
        library = self.quickly if cost <= HELD else self.library
        self._make_room(t, step.n_threads)
        room = self.room.data_ptr()
        library.petiole_join(
            ctypes.byref(model),
            ctypes.byref(join),
            ctypes.byref(self.token_norm),
            ctypes.byref(self.of_chain if chained else self.of_layers),
            c_int64(t),
            c_void_p(None if token_ids is None else token_ids.ctypes.data),
            c_void_p(known.ctypes.data),
            c_void_p(step.hidden),
            c_void_p(room),
            c_void_p(room + self.scratch),
            c_int64(self.stride),
            c_int32(1 if cost <= model.small else step.n_threads),
        )
        return library

    def _make_room(self, t: int, n_threads: int) -> None:
        if t <= self.most and n_threads <= self.n_threads:
            return
        self.most, self.n_threads = max(t, self.most), n_threads
        self.stride = self.library.petiole_join_scratch(ctypes.byref(self.join), c_int64(self.most))
        self.scratch = -(-4 * self.most * self.join.k // 64) * 64
        n_bytes = self.scratch + n_threads * self.stride
        self.room = new_tensor((-(-n_bytes // 4),), torch.float32, torch.device("cpu"))
