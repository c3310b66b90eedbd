"""A Qwen3-VL made small, for training. Its parameters have the published names, but for what `export` says.

    pixels ->  patches, block by block -> + positions -> layers ---+----------> layers -> merger  -> embeddings
                                                                   deep merger -> added behind layer 0 of the text

A picture's positions come before all questions about it, so they are computed once: each question reads their keys
and values. `probes` are for training alone: they read what the positions of a picture know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import model as text_model
from training.model import Qwen3
from training.vision.losses import KNOWN
from training.vision.tokens import CONTEXT, FIRST_NUMBER, VOCAB_SIZE, WHOLE

NUMBERS = slice(FIRST_NUMBER, FIRST_NUMBER + WHOLE + 1)
"""The places of numbers in the vocabulary."""
FREQUENCIES = 64


@dataclass(frozen=True)
class TowerShape:
    """Names as in `vision_config`."""

    hidden_size: int = 128
    intermediate_size: int = 384
    depth: int = 5
    num_heads: int = 4
    patch_size: int = 16
    spatial_merge_size: int = 2
    num_position_embeddings: int = 144
    deepstack_visual_indexes: tuple[int, ...] = (2,)


@dataclass(frozen=True)
class Shape:
    tower: TowerShape = TowerShape()
    text: text_model.Shape = field(
        default_factory=lambda: text_model.Shape(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=5,
            max_position_embeddings=CONTEXT,
        )
    )

    @property
    def sections(self) -> list[int]:
        """How many frequencies turn with time, row and column."""
        half = self.text.head_dim // 2
        return [half - 2 * (half // 3), half // 3, half // 3]

    def as_dict(self) -> dict[str, dict[str, object]]:
        return asdict(self)

    @staticmethod
    def of(raw: dict[str, dict[str, object]]) -> Shape:
        taps = raw["tower"]["deepstack_visual_indexes"]
        tower = TowerShape(**{**raw["tower"], "deepstack_visual_indexes": tuple(taps)})  # type: ignore
        return Shape(tower, text_model.Shape(**raw["text"]))  # type: ignore[arg-type]


class Merger(nn.Module):
    """joins_first: whether the norm is of the joined patches."""

    def __init__(self, shape: TowerShape, outputs: int, *, joins_first: bool) -> None:
        super().__init__()
        self.wide, self.joins_first = shape.hidden_size * shape.spatial_merge_size**2, joins_first
        self.norm = nn.LayerNorm(self.wide if joins_first else shape.hidden_size, eps=1e-6)
        self.linear_fc1, self.linear_fc2 = nn.Linear(self.wide, self.wide), nn.Linear(self.wide, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[N, patches, hidden] -> [N, blocks, outputs]."""
        joined = (len(x), -1, self.wide)
        x = self.norm(x.reshape(joined)) if self.joins_first else self.norm(x).reshape(joined)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.heads = shape.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"linear_fc1": nn.Linear(width, inner), "linear_fc2": nn.Linear(inner, width)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, T, hidden]; cos, sin [T, head_dim]."""
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = text_model.rotate(q, cos, sin), text_model.rotate(k, cos, sin)
        seen = text_model.attended(q, k, v)
        x = x + self.attn["proj"](seen.transpose(1, 2).flatten(2))
        inner = F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.mlp["linear_fc2"](inner)
        return out


class Tower(nn.Module):
    def __init__(self, shape: TowerShape, outputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = nn.ModuleDict({"proj": nn.Linear(3 * shape.patch_size**2, shape.hidden_size)})
        self.pos_embed = nn.Embedding(shape.num_position_embeddings, shape.hidden_size)
        nn.init.normal_(self.pos_embed.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.merger = Merger(shape, outputs, joins_first=False)
        taps = shape.deepstack_visual_indexes
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, outputs, joins_first=True) for _ in taps)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """uint8 [N, height, width, 3] -> [N, blocks, outputs], of the last layer and then of the deep ones."""
        patch, (high, wide) = self.shape.patch_size, (side // self.shape.patch_size for side in pixels.shape[1:3])
        values = (pixels.float() / 255 - 0.5) / 0.5
        cut = values.view(-1, high, patch, wide, patch, 3).permute(0, 1, 3, 5, 2, 4).flatten(3)
        x = self.patch_embed["proj"](self._in_blocks(cut)) + self._in_blocks(self._positions(high, wide))
        at = self._in_blocks(torch.arange(high * wide).view(1, high, wide, 1)).view(-1)
        cos, sin = self._turning(at // wide, at % wide)
        deep = []
        for number, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if number in self.shape.deepstack_visual_indexes:
                deep.append(self.deepstack_merger_list[len(deep)](x))
        return [self.merger(x), *deep]

    def _in_blocks(self, grid: Tensor) -> Tensor:
        """[N, rows, columns, width] -> [N, rows * columns, width], block by block."""
        merge = self.shape.spatial_merge_size
        split = grid.unflatten(2, (-1, merge)).unflatten(1, (-1, merge))
        return split.transpose(2, 3).flatten(1, 4)

    def _positions(self, high: int, wide: int) -> Tensor:
        side = math.isqrt(self.shape.num_position_embeddings)
        table = self.pos_embed.weight.view(1, side, side, -1).permute(0, 3, 1, 2)
        return F.interpolate(table, (high, wide), mode="bilinear", align_corners=True).permute(0, 2, 3, 1)

    def _turning(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        quarter = self.shape.hidden_size // self.shape.num_heads // 4
        frequencies = 10000.0 ** -(torch.arange(quarter).float() / quarter)
        angles = torch.cat([at[:, None] * frequencies for at in (rows, columns)], dim=-1).repeat(1, 2)
        return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Asked:
    """Rows of questions behind pictures. tokens: int64 [M, L]; owner: int64 [M], which prefix each is behind."""

    tokens: Tensor
    owner: Tensor


class SmallQwen(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.text.hidden_size
        self.text, self.tower = Qwen3(shape.text), Tower(shape.tower, width)
        self.numbers = nn.Linear(2 * FREQUENCIES, width, bias=False)
        nn.init.normal_(self.numbers.weight, std=(2 * FREQUENCIES * width) ** -0.5 * 1.4)
        self.probes = nn.ModuleList(
            nn.Linear(width, KNOWN) for _ in range(1 + len(self.tower.deepstack_merger_list))
        )
        half = torch.arange(shape.text.head_dim // 2)
        turned = torch.where(half < 3 * shape.sections[1], half % 3, 0)
        self.register_buffer("axes", turned.repeat(2), persistent=False)
        periods = 2.0 * 1000.0 ** torch.linspace(0, 1, FREQUENCIES)
        angles = 2 * math.pi * torch.arange(WHOLE + 1)[:, None] / periods
        self.register_buffer("waves", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)
        with torch.no_grad():
            self.text.model.embed_tokens.weight[NUMBERS] *= 0.1
            for name, weight in self.named_parameters():
                if name.endswith(
                    ("attn.proj.weight", "mlp.linear_fc2.weight", "o_proj.weight", "down_proj.weight")
                ):
                    weight.zero_()

    def table(self) -> Tensor:
        """[vocab, hidden], inputs and outputs: numbers lie on a curve, so that near ones begin alike, and each has
        something of its own beside it."""
        own: Tensor = self.text.model.embed_tokens.weight
        curve = self.numbers(self.waves)
        return own + F.pad(curve.to(own.dtype), (0, 0, NUMBERS.start, len(own) - NUMBERS.stop))

    def hidden(
        self, prefix: Tensor, positions: Tensor, places: Tensor, features: Sequence[Tensor], asked: Sequence[Asked]
    ) -> tuple[list[Tensor], Tensor]:
        """Final hidden states [M, L, hidden] of each group of rows, and the table.

        prefix: int64 [P], the tokens before questions; positions: int64 [3, P]; places: int64 [n], where pictures
        stand; features: [N, n, hidden], of the pictures of each prefix, and what is added behind the first layers.
        """
        table, decoder = self.table(), self.text.model
        x = F.embedding(prefix, table).expand(len(features[0]), -1, -1).index_copy(1, places, features[0].float())
        at = positions[self.axes].T
        cos, sin = self.text.cos.gather(0, at), self.text.sin.gather(0, at)
        begin, n_prefix = int(positions.max()) + 1, len(prefix)
        rows = [F.embedding(group.tokens, table) for group in asked]
        turns, masks = [], []
        for group in asked:
            length = group.tokens.shape[1]
            turns.append((self.text.cos[begin : begin + length], self.text.sin[begin : begin + length]))
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            masks.append(torch.cat([torch.ones(length, n_prefix, dtype=torch.bool), causal], dim=1))
        for number, layer in enumerate(decoder.layers):
            x, (k, v) = layer(x, cos, sin, None, None)
            if number + 1 < len(features):
                x = x.index_add(1, places, features[number + 1].to(x.dtype))
            for i, (group, turn, mask) in enumerate(zip(asked, turns, masks, strict=True)):
                rows[i], _ = layer(rows[i], *turn, (k[group.owner], v[group.owner]), mask)
        return [decoder.norm(row) for row in rows], table
