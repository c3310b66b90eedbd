"""A model and a step as the C files lay them out: model.h and heads.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from petiole.gpu_worker.runtime.cpu.native.products.weights import LinearStruct

NORMS = {"rms": 1, "layer": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
SCORES = {"softmax": 0, "chosen": 1, "sigmoid": 2}
MASKS = {"causal": 0, "prefix": 1, "bidirectional": 2}


class NormStruct(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p)]


class HeadsStruct(ctypes.Structure):
    _fields_ = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("kv_kind", c_int32),
        ("page_size", c_int32),
        ("mask", c_int32),
        ("window", c_int64),
        ("scale", c_float),
        ("cap", c_float),
        ("sinks", c_void_p),
        ("bias", c_void_p),
        ("distances", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("columns", c_int64),
        ("table", c_void_p),
    ]


MAPS = ("qkv", "net_gates", "out", "gate_up", "down", "router", "per_layer_gate", "per_layer_out")


class BendStruct(ctypes.Structure):
    _fields_ = [("clamp", c_float), ("slope", c_float), ("offset", c_float)]


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("n", c_int32),
        ("chosen", c_int32),
        ("score", c_int32),
        ("normalised", c_int32),
        ("groups", c_int32),
        ("best_groups", c_int32),
        ("of_group", c_int32),
        ("of_stream", c_int32),
        ("inner", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("factor", c_float),
        ("eps", c_float),
        ("bend", BendStruct),
        ("correction", c_void_p),
        ("scale", c_void_p),
        ("shares", c_void_p),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("dense_gate", c_void_p),
        ("taken", c_void_p),
        ("norm", NormStruct),
        ("out_norm", NormStruct),
        ("dense_out_norm", NormStruct),
    ]


class LatentsStruct(ctypes.Structure):
    _fields_ = [
        ("turning", c_int32),
        ("rank", c_int32),
        ("own", c_int32),
        ("value", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("norm", NormStruct),
        ("query_norm", NormStruct),
    ]


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("mixer_norm", NormStruct),
        ("mixer_out_norm", NormStruct),
        ("feed_forward_norm", NormStruct),
        ("feed_forward_out_norm", NormStruct),
        *((name, LinearStruct) for name in MAPS),
        ("q_norm", NormStruct),
        ("k_norm", NormStruct),
        ("v_norm", NormStruct),
        ("net_norm", NormStruct),
        ("per_layer_norm", NormStruct),
        ("heads", HeadsStruct),
        ("rotary", c_void_p),
        ("growth", c_void_p),
        ("rotary_dims", c_int32),
        ("neighbours", c_int32),
        ("shape", c_int32),
        ("borrowed", c_int32),
        ("values_are_keys", c_int32),
        ("output_gate", c_int32),
        ("norm_whole", c_int32),
        ("inner", c_int32),
        ("activation", c_int32),
        ("gated", c_int32),
        ("per_layer", c_int32),
        ("per_layer_activation", c_int32),
        ("parallel", c_int32),
        ("post_norm", c_int32),
        ("bend", BendStruct),
        ("residual", c_float),
        ("scalar", c_float),
        ("experts", c_void_p),
        ("latents", c_void_p),
        ("recurrent", c_void_p),
    ]


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("n_layers", c_int32),
        ("hidden", c_int32),
        ("n_shapes", c_int32),
        ("last_kept", c_int32),
        ("layers", c_void_p),
        ("shapes", c_void_p),
        *((name, c_int64) for name in ("qkv", "mixed", "gates", "acted", "terms", "experts", "room")),
        ("embedding_norm", NormStruct),
        ("norm", NormStruct),
        ("head", LinearStruct),
        ("per_layer_projection", LinearStruct),
        ("per_layer_norm", NormStruct),
        ("per_layer_width", c_int32),
        ("per_layer_embedding_factor", c_float),
        ("per_layer_projection_factor", c_float),
        ("per_layer_factor", c_float),
        ("embedding_factor", c_float),
        ("logits_factor", c_float),
        ("logits_cap", c_float),
        ("small", c_int64),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        ("t", c_int64),
        ("from", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("rotary", c_void_p),
        ("limits", c_void_p),
        ("rows", c_void_p),
        ("copies", c_void_p),
        ("extra", c_void_p),
        ("per_layer", c_void_p),
        ("projected", c_void_p),
        ("per_layer_stride", c_int64),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("gates", c_void_p),
        ("queries", c_void_p),
        ("head_in", c_void_p),
        ("head_out", c_void_p),
        ("acted", c_void_p),
        ("added", c_void_p),
        ("streamed", c_void_p),
        ("scores", c_void_p),
        ("chosen", c_void_p),
        ("places", c_void_p),
        ("shares", c_void_p),
        ("openings", c_void_p),
        ("pairs", c_void_p),
        ("pair_gates", c_void_p),
        ("pair_acted", c_void_p),
        ("routes", c_void_p),
        ("adapters", c_void_p),
        ("reduced", c_void_p),
        ("reduced_stride", c_int64),
        ("o", c_int64),
        ("outputs", c_void_p),
        ("logits", c_void_p),
        ("n_threads", c_int32),
        ("scratch", c_void_p),
        ("scratch_stride", c_int64),
        ("progress", ctypes.CFUNCTYPE(None)),
    ]
