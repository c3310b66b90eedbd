"""Turn a checkpoint into a model folder: `python -m training.vision.export FOLDER`.

The weights have the published names, in bfloat16; the configuration names its dimensions and the tokens of its
templates as the reference implementation's configuration does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.vision import tokens
from training.vision.model import Moondream, Shape
from training.vision.train import DEFAULT_CHECKPOINT, geometry_of, load_model


def config_of(shape: Shape) -> dict[str, Any]:
    vision, text, region = shape.vision, shape.text, shape.region
    return {
        "architectures": ["HfMoondream"],
        "model_type": "moondream1",
        "eos_token_id": tokens.EOS,
        "torch_dtype": "bfloat16",
        "config": {
            "text": {
                "dim": text.dim,
                "ff_dim": text.ff,
                "n_layers": text.layers,
                "vocab_size": text.vocab,
                "max_context": text.context,
                "n_heads": text.heads,
                "n_kv_heads": text.heads,
                "prefix_attn": 1 + vision.grid**2,
            },
            "vision": {
                "enc_dim": vision.dim,
                "enc_patch_size": vision.patch,
                "enc_n_layers": vision.layers,
                "enc_ff_dim": vision.ff,
                "enc_n_heads": vision.heads,
                "proj_out_dim": text.dim,
                "proj_inner_dim": vision.projection,
                "crop_size": geometry_of(shape).size,
                "max_crops": vision.max_crops,
                "overlap_margin": vision.margin,
            },
            "region": {
                "dim": text.dim,
                "coord_feat_dim": 2 * region.coordinate_features,
                "coord_out_dim": region.bins,
                "size_feat_dim": 2 * region.size_features,
                "size_out_dim": 2 * region.bins,
                "inner_dim": region.inner,
            },
            "tokenizer": {"templates": tokens.templates(tokens.build())},
        },
    }


def export(model: Moondream, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name.startswith("model.")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_of(model.shape), indent=2) + "\n")
    tokens.build().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.shape.text.context,
        "eos_token": "<|eos|>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


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
