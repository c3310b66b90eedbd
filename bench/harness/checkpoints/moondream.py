"""A Moondream 2 of any size with random weights, in the published layout: the values of weights do not change the
speed.

`shapes` names the tensors; `checkpoint` writes the full model, bf16 and 3.9 GB, with a tokenizer of bytes.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.checkpoints.decoders import write_tokenizer
from petiole.gpu_worker.models.moondream.config import MoondreamConfig, parse_moondream_config

Shapes = dict[str, tuple[int, ...]]

FULL: dict[str, dict[str, int]] = {
    "text": {"dim": 2048, "ff_dim": 8192, "n_layers": 24, "vocab_size": 51200, "n_heads": 32, "n_kv_heads": 32},
    "vision": {
        "enc_dim": 1152,
        "enc_n_layers": 27,
        "enc_ff_dim": 4304,
        "enc_n_heads": 16,
        "proj_out_dim": 2048,
        "proj_inner_dim": 8192,
    },
    "region": {"dim": 2048, "coord_feat_dim": 256, "size_feat_dim": 512, "inner_dim": 8192},
}
_PATCH = 14
_NORM = re.compile(r"(norm|ln)\d?\.weight$")
_TABLE = re.compile(r"(features|wte|pos_emb|pos_embed\.weight|embed_tokens\.weight)$")


@dataclass(frozen=True)
class Seeing:
    """The shape of a Moondream 2, from its `config.json`. Counts the operations for a picture."""

    name: str
    dtype: str
    raw: dict[str, Any]

    @property
    def config(self) -> MoondreamConfig:
        return parse_moondream_config(self.raw)

    def encode_operations(self, n_crops: int) -> float:
        """The operations to encode one image."""
        vision, hidden = self.config.vision, self.config.text.hidden_size
        positions, dim = vision.geometry.grid**2, vision.dim
        block = 2 * positions * dim * (4 * dim + 2 * vision.ff) + 4 * positions**2 * dim
        crop = 2 * positions * 3 * vision.geometry.patch**2 * dim + vision.layers * block
        return n_crops * crop + 2 * positions * vision.projection * (2 * dim + hidden)

    def prefill_operations(self, n_tokens: int) -> float:
        """The operations of an image, the text after it, and the first token."""
        text, hidden = self.config.text, self.config.text.hidden_size
        image = 1 + self.config.vision.geometry.grid**2
        seen = image**2 + n_tokens * (image + n_tokens / 2)
        layer = 2 * (image + n_tokens) * hidden * (4 * hidden + 2 * text.layers[0].dense.inner)
        return text.n_layers * (layer + 4 * seen * hidden) + 2 * text.vocab_size * hidden


FULL_BF16 = Seeing("Moondream 2 shape, bf16", "bfloat16", {"architectures": ["HfMoondream"], "config": FULL})


def shapes(config: Mapping[str, Mapping[str, int]]) -> Shapes:
    """The tensors of a checkpoint, without the leading `model.`, in a fixed order."""
    text, vision, region = config["text"], config["vision"], config["region"]
    dim, wide, grid = text["dim"], vision["enc_dim"], vision.get("crop_size", 378) // _PATCH
    found: Shapes = {"vision.pos_emb": (1, grid**2, wide), "text.wte": (text["vocab_size"], dim)}

    def linear(name: str, outputs: int, inputs: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str, size: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (size,), (size,)

    def mlp(name: str, inputs: int, inner: int, outputs: int) -> None:
        linear(f"{name}.fc1", inner, inputs)
        linear(f"{name}.fc2", outputs, inner)

    linear("vision.patch_emb", wide, 3 * _PATCH**2)
    for i in range(vision["enc_n_layers"]):
        at = f"vision.blocks.{i}"
        norm(f"{at}.ln1", wide)
        linear(f"{at}.attn.qkv", 3 * wide, wide)
        linear(f"{at}.attn.proj", wide, wide)
        norm(f"{at}.ln2", wide)
        mlp(f"{at}.mlp", wide, vision["enc_ff_dim"], wide)
    norm("vision.post_ln", wide)
    mlp("vision.proj_mlp", 2 * wide, vision["proj_inner_dim"], dim)
    for i in range(text["n_layers"]):
        at = f"text.blocks.{i}"
        norm(f"{at}.ln", dim)
        linear(f"{at}.attn.qkv", 3 * dim, dim)
        linear(f"{at}.attn.proj", dim, dim)
        mlp(f"{at}.mlp", dim, text["ff_dim"], dim)
    norm("text.post_ln", dim)
    linear("text.lm_head", text["vocab_size"], dim)
    linear("region.coord_encoder", dim, region["coord_feat_dim"])
    linear("region.size_encoder", dim, region["size_feat_dim"])
    mlp("region.coord_decoder", dim, region["inner_dim"], 1024)
    mlp("region.size_decoder", dim, region["inner_dim"], 2048)
    found["region.coord_features"] = (1, region["coord_feat_dim"] // 2)
    found["region.size_features"] = (2, region["size_feat_dim"] // 2)
    return found


@contextmanager
def checkpoint(config: Mapping[str, Mapping[str, int]] = FULL) -> Iterator[Path]:
    """A folder with random weights, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as name:
        write(config, Path(name))
        yield Path(name)


def write(config: Mapping[str, Mapping[str, int]], folder: Path) -> None:
    """Write random weights in bfloat16."""
    save({"model." + name: shape for name, shape in shapes(config).items()}, folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["HfMoondream"], "config": dict(config)}))
    write_tokenizer(config["text"]["vocab_size"], folder)


def save(shapes: Shapes, folder: Path) -> None:
    """Random weights in bfloat16, scaled so that products keep the size of their inputs."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    drawn = torch.empty(1 << 24).normal_(generator=generator).bfloat16()
    tensors: dict[str, Any] = {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        start = int(torch.randint(len(drawn) // 2, (1,), generator=generator))
        flat = drawn[start:].repeat(1 + size // (len(drawn) // 2))[:size].view(shape)
        if len(shape) == 1:
            flat = 1 + 0.1 * flat if _NORM.search(name) else 0.1 * flat
        elif not _TABLE.search(name):
            flat = flat * (size // shape[0]) ** -0.5
        tensors[name] = flat.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
