"""Turn a checkpoint into a model folder: `python -m training.vision.export FOLDER`.

The folder is one of transformers' `Qwen3VLForConditionalGeneration`, with weights in bfloat16. A patch has two
frames, of which each takes half of the weights: both are the same picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.vision import tokens
from training.vision.batches import pictures_of
from training.vision.model import Shape, SmallQwen
from training.vision.train import DEFAULT_CHECKPOINT, load_model

FRAMES = 2


def config_of(shape: Shape) -> dict[str, Any]:
    """`config.json`."""
    rope = {"rope_type": "default", "rope_theta": shape.text.rope_theta, "mrope_section": shape.sections}
    text = {name: value for name, value in shape.text.as_dict().items() if name != "rope_theta"}
    tower = shape.tower
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "image_token_id": tokens.IMAGE,
        "video_token_id": tokens.VIDEO,
        "vision_start_token_id": tokens.VISION_START,
        "vision_end_token_id": tokens.VISION_END,
        "text_config": {
            "model_type": "qwen3_vl_text",
            **text,
            "attention_bias": False,
            "hidden_act": "silu",
            "rope_parameters": {**rope, "mrope_interleaved": True},
            "tie_word_embeddings": True,
            "eos_token_id": tokens.IM_END,
            "bos_token_id": None,
            "pad_token_id": tokens.END_OF_TEXT,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "hidden_size": tower.hidden_size,
            "intermediate_size": tower.intermediate_size,
            "depth": tower.depth,
            "num_heads": tower.num_heads,
            "patch_size": tower.patch_size,
            "spatial_merge_size": tower.spatial_merge_size,
            "temporal_patch_size": FRAMES,
            "in_channels": 3,
            "out_hidden_size": shape.text.hidden_size,
            "num_position_embeddings": tower.num_position_embeddings,
            "deepstack_visual_indexes": list(tower.deepstack_visual_indexes),
            "hidden_act": "gelu_pytorch_tanh",
        },
    }


def published(model: SmallQwen) -> dict[str, Tensor]:
    """The weights by their published names."""
    stored = model.state_dict()
    found = {"model.language_model.embed_tokens.weight": model.table().detach()}
    for name, weight in stored.items():
        if name.startswith("text.model.") and "embed_tokens" not in name:
            found[name.replace("text.model.", "model.language_model.", 1)] = weight
        elif name.startswith("tower."):
            found[name.replace("tower.", "model.visual.", 1)] = weight
    patch, name = model.shape.tower.patch_size, "model.visual.patch_embed.proj.weight"
    found[name] = found[name].view(-1, 3, 1, patch, patch).expand(-1, -1, FRAMES, -1, -1) / FRAMES
    return {name: weight.to(torch.bfloat16).contiguous() for name, weight in found.items()}


def export(model: SmallQwen, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shape, pictures = model.shape, pictures_of(model.shape.tower)
    tokens.build().save(str(folder / "tokenizer.json"))
    files: Mapping[str, Mapping[str, Any]] = {
        "config.json": config_of(shape),
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [tokens.IM_END, tokens.END_OF_TEXT],
            "pad_token_id": tokens.END_OF_TEXT,
        },
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": pictures.patch,
            "merge_size": pictures.merge,
            "temporal_patch_size": FRAMES,
            "image_mean": list(pictures.mean),
            "image_std": list(pictures.std),
            "size": {"shortest_edge": pictures.least, "longest_edge": pictures.most},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.text.max_position_embeddings,
            "eos_token": tokens.SPECIAL[tokens.IM_END],
            "pad_token": tokens.SPECIAL[tokens.END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "chat_template": tokens.CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    args = parser.parse_args()
    model, _ = load_model(args.checkpoint)
    export(model, args.folder)
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
