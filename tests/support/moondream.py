"""A narrow Moondream 2 with drawn weights, in the published layout: one that the reference implementation can run.

The reference fixes the crops' size, the grid of 27 and 27 encoder layers. Widths, heads and layers of text may
shrink.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from bench.harness.checkpoints.moondream import shapes
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.request.prepared_images import PreparedImage

NARROW: dict[str, Any] = {
    "text": {"dim": 128, "ff_dim": 256, "n_layers": 3, "vocab_size": 512, "n_heads": 2, "n_kv_heads": 2},
    "vision": {
        "enc_dim": 64,
        "enc_n_layers": 27,
        "enc_ff_dim": 96,
        "enc_n_heads": 4,
        "proj_out_dim": 128,
        "proj_inner_dim": 160,
    },
    "region": {"dim": 128, "coord_feat_dim": 32, "size_feat_dim": 64, "inner_dim": 96},
}
PROMPT = [1, 15, 2, 77, 78, 79, 3]
KINDS = [5, 5, 6] * 3
"""Of the tokens that a test forces: coordinate, coordinate, size."""


def weights(config: dict[str, Any] = NARROW, seed: int = 1) -> dict[str, torch.Tensor]:
    """float32, drawn by a generator whose numbers do not change between versions of numpy."""
    rng, drawn = np.random.RandomState(seed), {}
    for name, shape in shapes(config).items():
        tensor = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
        if name.endswith(("ln1.weight", "ln2.weight", "ln.weight")):
            tensor = 1 + 0.1 * tensor
        elif len(shape) == 1:
            tensor = 0.3 * tensor
        elif not name.endswith(("features", "wte", "pos_emb")):
            tensor = tensor * 1.6 / shape[-1] ** 0.5
        drawn[name] = tensor
    return drawn


def write_model(folder: Path, config: dict[str, Any] = NARROW, prefix: str = "model.", **more: Any) -> Path:
    save_file({prefix + name: tensor for name, tensor in weights(config).items()}, folder / "model.safetensors")
    raw = {"architectures": ["HfMoondream"], "config": config, **more}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_adapter_of_moondream(folder: Path, merged: Path, rank: int = 4) -> None:
    """An adapter on all products of the decoder of text, under the names of the checkpoint; and a model with its
    weights merged in."""
    drawn, generator = weights(), torch.Generator().manual_seed(5)
    tensors = {}
    for name in [name for name in drawn if name.startswith("text.blocks.") and drawn[name].ndim == 2]:
        outputs, inputs = drawn[name].shape
        a, b = (0.3 * torch.randn(shape, generator=generator) for shape in ((rank, inputs), (outputs, rank)))
        at = "base_model.model.model." + name.removesuffix(".weight")
        tensors |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
        drawn[name] = drawn[name] + 2 * b @ a
    for path in (folder, merged):
        path.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 2 * rank}))
    write_model(merged)
    save_file({"model." + name: tensor for name, tensor in drawn.items()}, merged / "model.safetensors")


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (9, 13, 3)).astype(np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def prepared(pixels: np.ndarray, tiling: tuple[int, int], content_hash: int = 1) -> PreparedImage:
    return PreparedImage(content_hash, 729, pixels, tiling)


def exact_crops(tiling: tuple[int, int] = (1, 2), seed: int = 3) -> np.ndarray:
    """Crops that no resizing has a part in."""
    n, size = 1 + tiling[0] * tiling[1], CropGeometry().size
    coarse = np.random.RandomState(seed).randint(0, 256, (n, 27, 27, 3)).astype(np.uint8)
    return coarse.repeat(size // 27, axis=1).repeat(size // 27, axis=2)


class Forced:
    """A skill whose tokens are known: only their values are not."""

    def __init__(self, values: tuple[tuple[float, ...], ...] = ()) -> None:
        self.values = values

    def allowed_at(self, index: int) -> list[int]:
        return [KINDS[index]] if index < len(KINDS) else [0]

    def consume_step(self, token_id: int, values: Any = ()) -> None:
        self.values += (tuple(values),)

    def finalize(self) -> Any:
        return self.values

    def fork(self) -> Forced:
        return Forced(self.values)
