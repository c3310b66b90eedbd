"""Moondream 2. Its plan is that of the decoder of text; `models.moondream` has its encoder, values and skills."""

from __future__ import annotations

from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.moondream.config import ARCHITECTURES, text_plan
from petiole.gpu_worker.models.moondream.weights import read_moondream
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    heads=("model.text.lm_head", "text.lm_head"),
    embedding="text.wte",
    norm="text.post_ln",
    layer="text.blocks.{}.",
    mixer_norm="ln",
    qkv=("attn.qkv",),
    out=("attn.proj",),
    gate_up=("mlp.fc1",),
    down=("mlp.fc2",),
)

FAMILIES = (Family(ARCHITECTURES, text_plan, NAMES, read_moondream),)
