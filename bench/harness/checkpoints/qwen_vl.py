"""A Qwen3-VL of any size with random weights, in the published layout, with a tokenizer in which every token is a
word, and a chat template that places pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.harness.checkpoints.decoders import write_tokenizer
from bench.harness.checkpoints.moondream import save

VOCAB, MARKS = 151_936, {"<|vision_start|>": 151_652, "<|vision_end|>": 151_653, "<|image_pad|>": 151_655}
PAD = MARKS["<|image_pad|>"]
_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}{% for part in message.content -%}
        {%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
        {%- else %}{{ part.text }}{% endif -%}
    {%- endfor %}{% endif %}
{%- endfor %}"""
_ROPE = {
    "rope_type": "default",
    "rope_theta": 5_000_000.0,
    "mrope_section": [24, 20, 20],
    "mrope_interleaved": True,
}
FULL: dict[str, dict[str, Any]] = {
    "text_config": {
        "vocab_size": VOCAB,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": _ROPE,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
"""The sizes of Qwen3-VL 2B."""
QUICK = {
    "text_config": FULL["text_config"] | {"num_hidden_layers": 4},
    "vision_config": FULL["vision_config"] | {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]},
}
_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write(config: dict[str, dict[str, Any]], folder: Path) -> None:
    """In bfloat16. Raises ImportError without transformers."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    whole = Qwen3VLConfig(**config, image_token_id=PAD, tie_word_embeddings=True, dtype="bfloat16")
    whole.architectures = [Qwen3VLForConditionalGeneration.__name__]
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(whole)
    save({name: tuple(weight.shape) for name, weight in model.named_parameters()}, folder)
    whole.save_pretrained(folder)
    write_tokenizer(VOCAB, folder)
    _name_marks(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PICTURES))


def _name_marks(folder: Path) -> None:
    """Give some words of the tokenizer the names of marks."""
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    words = {number: word for word, number in described["model"]["vocab"].items()}
    words |= {number: mark for mark, number in MARKS.items()}
    described["model"]["vocab"] = {word: number for number, word in words.items()}
    switches = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"] = [{"id": number, "content": mark, **switches} for mark, number in MARKS.items()]
    path.write_text(json.dumps(described))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
