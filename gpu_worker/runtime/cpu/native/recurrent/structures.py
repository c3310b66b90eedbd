"""A mixer that keeps a state as recurrent.h and convolution.h lay it out, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p

from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.mamba2 import Mamba2Weights
from petiole.gpu_worker.models.parts.recurrent.mixing import RecurrentWeights
from petiole.gpu_worker.models.parts.recurrent.short import ShortConvolutionWeights
from petiole.gpu_worker.models.parts.recurrent.states import LayerState
from petiole.gpu_worker.models.plan import DeltaNet, Mamba2, Recurrent, ShortConvolution
from petiole.gpu_worker.runtime.cpu.native.products.weights import KINDS, Weights

RULES = {ShortConvolution: 0, DeltaNet: 1, Mamba2: 2}


class ConvolutionStruct(ctypes.Structure):
    _fields_ = [
        ("kernel", c_int32),
        ("channels", c_int32),
        ("kind", c_int32),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_void_p),
    ]


class PartStruct(ctypes.Structure):
    _fields_ = [("first", c_int32), ("apart", c_int32), ("channel", c_int32)]


class RecurrentStruct(ctypes.Structure):
    _fields_ = [
        ("convolution", ConvolutionStruct),
        ("rule", c_int32),
        ("key_heads", c_int32),
        ("each", c_int32),
        ("run", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        *((name, PartStruct) for name in ("queries", "keys", "values", "z", "b", "a")),
        ("fading", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("matrices", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("places", c_int64),
    ]


def recurrent_struct(
    plan: Recurrent, weights: RecurrentWeights, state: LayerState, memory: Weights
) -> RecurrentStruct:
    """A mixer over its states, which it orders as it likes. memory: keeps the weights."""
    bias = None if isinstance(weights, DeltaNetWeights) else weights.convolution_bias
    struct = RecurrentStruct(
        ConvolutionStruct(
            kernel=plan.kernel,
            channels=plan.channels,
            kind=KINDS[state.inputs.dtype],
            weight=memory.floats(weights.convolution.t()),
            bias=memory.floats(bias),
            inputs=state.inputs.data_ptr(),
        ),
        RULES[type(plan)],
    )
    if isinstance(plan, ShortConvolution) or isinstance(weights, ShortConvolutionWeights):
        return struct
    assert state.matrices is not None
    value_heads, struct.key_dim, struct.value_dim = plan.matrices
    struct.key_heads, struct.each = value_heads // plan.each, plan.each
    struct.run = plan.run if isinstance(plan, DeltaNet) else plan.each
    channel = 0
    for name in (*plan.convolved, *(plan.parts.keys() - plan.convolved)):
        part = plan.parts[name]
        setattr(struct, name, PartStruct(part.first, part.apart, channel))
        channel += struct.key_heads * part.size
    struct.fading, struct.bias = memory.floats(weights.fading), memory.floats(weights.bias)
    struct.skip = memory.floats(weights.skip) if isinstance(weights, Mamba2Weights) else None
    struct.matrices, struct.places = state.matrices.data_ptr(), len(state.matrices)
    if state.rounded is not None:
        struct.codes, struct.scales = state.rounded.codes.data_ptr(), state.rounded.scales.data_ptr()
    return struct
