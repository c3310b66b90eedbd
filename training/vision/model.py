"""Moondream 2 made small, for training. Its parameters have the names of the published weights.

Many questions about one picture are one row: the picture's positions see each other, and each question sees the
picture and itself, as if it stood alone behind the picture. `cells` and `places` are for training alone: they read
what a position of the picture knows, behind the projection and before the last blocks of the text decoder.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.vision.losses import KNOWN
from training.vision.tokens import BINS, COORDINATE, SIZE, VOCAB_SIZE

DEPTH = 2
"""So many blocks of the text decoder read what `places` taught the positions of the picture."""
ROTARY = 32
"""Dimensions of a text head that are rotated, of 64."""


@dataclass(frozen=True)
class VisionShape:
    dim: int = 128
    heads: int = 4
    layers: int = 4
    ff: int = 384
    patch: int = 14
    grid: int = 9
    margin: int = 2
    max_crops: int = 4
    projection: int = 384


@dataclass(frozen=True)
class TextShape:
    dim: int = 128
    heads: int = 2
    layers: int = 5
    ff: int = 512
    vocab: int = VOCAB_SIZE
    context: int = 512


@dataclass(frozen=True)
class RegionShape:
    coordinate_features: int = 64
    size_features: int = 128
    inner: int = 256
    bins: int = BINS


@dataclass(frozen=True)
class Shape:
    vision: VisionShape = VisionShape()
    text: TextShape = TextShape()
    region: RegionShape = RegionShape()

    def as_dict(self) -> dict[str, dict[str, int]]:
        return asdict(self)

    @staticmethod
    def of(raw: dict[str, dict[str, int]]) -> Shape:
        return Shape(VisionShape(**raw["vision"]), TextShape(**raw["text"]), RegionShape(**raw["region"]))


def _mlp(inputs: int, inner: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"fc1": nn.Linear(inputs, inner), "fc2": nn.Linear(inner, outputs)})


def _attention(dim: int) -> nn.ModuleDict:
    return nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})


def _through(x: Tensor, mlp: nn.ModuleDict) -> Tensor:
    out: Tensor = mlp["fc2"](F.gelu(mlp["fc1"](x), approximate="tanh"))
    return out


class Moondream(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        v, t, r = shape.vision, shape.text, shape.region
        vision = nn.ModuleDict(
            {
                "patch_emb": nn.Linear(3 * v.patch**2, v.dim),
                "blocks": nn.ModuleList(
                    nn.ModuleDict(
                        {
                            "ln1": nn.LayerNorm(v.dim),
                            "attn": _attention(v.dim),
                            "ln2": nn.LayerNorm(v.dim),
                            "mlp": _mlp(v.dim, v.ff, v.dim),
                        }
                    )
                    for _ in range(v.layers)
                ),
                "post_ln": nn.LayerNorm(v.dim),
                "proj_mlp": _mlp(2 * v.dim, v.projection, t.dim),
            }
        )
        vision.register_parameter("pos_emb", nn.Parameter(torch.randn(1, v.grid**2, v.dim) * 0.1))
        text = nn.ModuleDict(
            {
                "blocks": nn.ModuleList(
                    nn.ModuleDict(
                        {"ln": nn.LayerNorm(t.dim), "attn": _attention(t.dim), "mlp": _mlp(t.dim, t.ff, t.dim)}
                    )
                    for _ in range(t.layers)
                ),
                "post_ln": nn.LayerNorm(t.dim),
                "lm_head": nn.Linear(t.dim, t.vocab),
            }
        )
        text.register_parameter("wte", nn.Parameter(torch.randn(t.vocab, t.dim) * 0.5))
        region = nn.ModuleDict(
            {
                "coord_encoder": nn.Linear(2 * r.coordinate_features, t.dim),
                "size_encoder": nn.Linear(2 * r.size_features, t.dim),
                "coord_decoder": _mlp(t.dim, r.inner, r.bins),
                "size_decoder": _mlp(t.dim, r.inner, 2 * r.bins),
            }
        )
        region.register_parameter("coord_features", nn.Parameter(torch.randn(1, r.coordinate_features) * 3))
        region.register_parameter("size_features", nn.Parameter(torch.randn(2, r.size_features) * 3))
        self.cells, self.places = nn.Linear(t.dim, KNOWN), nn.Linear(t.dim, KNOWN)
        self.model = nn.ModuleDict({"vision": vision, "text": text, "region": region})
        for name, weight in self.named_parameters():
            if name.endswith(("attn.proj.weight", "mlp.fc2.weight")) and "blocks" in name:
                nn.init.zeros_(weight)

    # ------------------------------------------------------------ the picture

    def images(self, crops: Tensor, tiling: tuple[int, int]) -> Tensor:
        """uint8 [N, 1 + rows * columns, size, size, 3] -> [N, grid², text dim]."""
        v = self.shape.vision
        n = len(crops)
        alone = tiling == (1, 1)  # then both crops are the same
        used = crops[:, :1] if alone else crops
        features = self._encoded(used.flatten(0, 1)).view(n, -1, v.grid, v.grid, v.dim)
        whole, local = features[:, 0], features[:, 0] if alone else self._joined(features[:, 1:], tiling)
        pooled = F.adaptive_avg_pool2d(local.permute(0, 3, 1, 2), v.grid).permute(0, 2, 3, 1)
        both = torch.cat([whole, pooled], dim=-1).flatten(1, 2)
        return _through(both, self.model["vision"]["proj_mlp"])

    def _encoded(self, crops: Tensor) -> Tensor:
        v, w = self.shape.vision, self.model["vision"]
        x = (crops.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        x = x.reshape(len(x), 3, v.grid, v.patch, v.grid, v.patch).permute(0, 2, 4, 1, 3, 5)
        x = w["patch_emb"](x.reshape(len(x), v.grid**2, -1)) + w.pos_emb
        for block in w["blocks"]:
            qkv = block["attn"]["qkv"](block["ln1"](x)).unflatten(-1, (3, v.heads, -1))
            q, k, value = qkv.permute(2, 0, 3, 1, 4)
            x = x + block["attn"]["proj"](_attended(q, k, value).transpose(1, 2).flatten(2))
            x = x + _through(block["ln2"](x), block["mlp"])
        out: Tensor = w["post_ln"](x)
        return out

    def _joined(self, local: Tensor, tiling: tuple[int, int]) -> Tensor:
        """Local crops side by side, without the margins at inner edges."""
        rows, columns = tiling
        m = self.shape.vision.margin
        grid = local.unflatten(1, tiling)

        def inner(at: int, last: int) -> slice:
            return slice(m if at else 0, None if at == last else -m)

        lines = [
            torch.cat(
                [grid[:, i, j, inner(i, rows - 1), inner(j, columns - 1)] for j in range(columns)],
                dim=2,
            )
            for i in range(rows)
        ]
        return torch.cat(lines, dim=1)

    # ------------------------------------------------------------ text

    def embedded(self, tokens: Tensor, bins: Tensor) -> Tensor:
        """int64 [N, T], int64 [N, T, 2] -> [N, T, dim]."""
        region, known = self.model["region"], bins[..., 0] >= 0
        x = F.embedding(tokens, self.model["text"].wte)
        coordinate = bins[..., :1].clamp(min=0) / self.shape.region.bins
        size = torch.exp2(bins.clamp(min=0) * 10 / (self.shape.region.bins - 1) - 10)
        at_coordinate, at_size = (tokens == COORDINATE) & known, (tokens == SIZE) & known
        x = torch.where(
            at_coordinate[..., None], region["coord_encoder"](_fourier(coordinate, region.coord_features)), x
        )
        return torch.where(at_size[..., None], region["size_encoder"](_fourier(size, region.size_features)), x)

    def hidden(self, x: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, T, dim], positions int64 [N, T], mask bool [N, 1, T, T] -> [N, T, dim] before the last `DEPTH`
        blocks, and behind all of them, before the final norm."""
        t = self.shape.text
        half = ROTARY // 2
        frequencies = 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = positions[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()

        def rotated(y: Tensor) -> Tensor:
            low, high, rest = y.split([half, half, y.shape[-1] - ROTARY], dim=-1)
            return torch.cat([low * cos - high * sin, low * sin + high * cos, rest], dim=-1)

        halfway = x
        for number, block in enumerate(self.model["text"]["blocks"]):
            halfway = x if number == t.layers - DEPTH else halfway
            inside = block["ln"](x)
            q, k, v = block["attn"]["qkv"](inside).unflatten(-1, (3, t.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = _attended(rotated(q), rotated(k), v, mask)
            x = x + block["attn"]["proj"](seen.transpose(1, 2).flatten(2)) + _through(inside, block["mlp"])
        return halfway, x

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.model["text"]["lm_head"](self.model["text"]["post_ln"](hidden))
        return out

    def coordinate_logits(self, hidden: Tensor) -> Tensor:
        return _through(hidden, self.model["region"]["coord_decoder"])

    def size_logits(self, hidden: Tensor) -> Tensor:
        return _through(hidden, self.model["region"]["size_decoder"]).unflatten(-1, (2, -1))


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Plain products: for rows this short on a CPU, faster than `scaled_dot_product_attention`."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v


def _fourier(values: Tensor, features: Tensor) -> Tensor:
    """The product is spelt out: in bfloat16, as autocast would have it, the angles were wrong by much."""
    turns = 2 * math.pi * (values[..., None] * features).sum(-2)
    return torch.cat([turns.cos(), turns.sin()], dim=-1)
