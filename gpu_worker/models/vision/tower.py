"""A tower: the patches of pictures, of any number and shape, to features.

    pixels [1, h, w, 3]  ->  patches in the order of blocks  ->  + learned positions
    layers               all patches of a picture, or of a window, see each other; turned by row and column, or not
    merger               the patches of a block  ->  one position of the decoder of text
    deep mergers         the same behind earlier layers: added behind the first layers of the decoder of text

Pictures of one step are packed: one product computes the patches of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.parts.rotary import Rotation, rotated
from petiole.gpu_worker.models.plan import Layer
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.joining import Joining
from petiole.gpu_worker.models.weights.linear import Linear


class Positions(Protocol):
    def of(self, rows: int, columns: int) -> Tensor:
        """[rows, columns, hidden]: what is added to the patches of a picture."""
        ...


@dataclass(frozen=True, slots=True)
class BentTable:
    """Between the entries of a square table, whose corners are those of the picture. table: [side², hidden]."""

    table: Tensor
    side: int

    def of(self, rows: int, columns: int) -> Tensor:
        side, place = self.side, self.table.device
        at = []
        for n in (rows, columns):
            along = torch.arange(n, device=place, dtype=torch.float32) * (side - 1) / max(n - 1, 1)
            low = along.floor()
            at.append((low.long(), (low.long() + 1).clamp(max=side - 1), along - low))
        (top, bottom, down), (left, right, across) = at
        found = torch.zeros((), device=place)
        for row, of_row in ((top, 1 - down), (bottom, down)):
            for column, of_column in ((left, 1 - across), (right, across)):
                entries = self.table[row[:, None] * side + column[None, :]]
                found = found + entries * (of_row[:, None] * of_column[None, :])[..., None]
        return found


@dataclass(frozen=True, slots=True)
class AxisTables:
    """The sum of what a column has and what a row has. tables: [2, most, hidden], of columns and of rows."""

    tables: Tensor

    def of(self, rows: int, columns: int) -> Tensor:
        across, down = self.tables[0], self.tables[1]
        return across[None, :columns] + down[:rows, None]


@dataclass(frozen=True, slots=True)
class NearestTable:
    """The entry of a square table in which each patch begins. table: [side², hidden]."""

    table: Tensor
    side: int

    def of(self, rows: int, columns: int) -> Tensor:
        place, at = self.table.device, []
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side, device=place)
        for n in (rows, columns):
            begins = torch.arange(n, dtype=torch.float32, device=place) * (1.0 / torch.tensor(n))
            at.append(torch.bucketize(begins.clamp(max=1 - 1e-6), bounds, right=True))
        return self.table[at[0][:, None] * self.side + at[1][None, :]]


Behind = Callable[[int, Tensor], None]
"""Called after a layer with its number and the residual stream."""
Spans = Sequence[Sequence[int]]
"""For each layer, the lengths of the runs of patches that see each other."""
Computed = Callable[[Tensor, Tensor, Spans, Behind], Tensor]
"""The layers: inputs [T, hidden], int64 [2, T] rows and columns, spans, what is called after the layers that are
taken -> [T, hidden]."""


@dataclass(frozen=True, slots=True)
class Grid:
    """rows, columns: of a picture's patches."""

    rows: int
    columns: int

    @property
    def n(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Windows:
    """patches: int64 [T], window by window. back: int64 [blocks], the place of each block in that order."""

    patches: Tensor
    back: Tensor
    spans: Spans


@dataclass(frozen=True, slots=True)
class Tower:
    """stack: the layers, without embedding and head. values: float32 [3, 256], see `ResizedPictures`. first_norm:
    of the layers' inputs, as the first layer's norm is. between: [tokens, outputs], the embeddings of what stands
    between features."""

    config: TowerConfig
    patches: Linear
    positions: Positions | None
    stack: Decoder
    merger: Joining
    deep: tuple[Joining, ...]
    values: Tensor
    first_norm: NormWeights | None = None
    between: Tensor | None = None

    def encode(
        self,
        images: Sequence[tuple[Tensor, tuple[int, int]]],
        computed: Computed | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """See `ImageDecoder`. uint8 [frames or tiles, height, width, 3] each -> features [1 + deep, positions,
        hidden] each. computed: the layers; None: in torch. progress: called after each layer that torch
        computes."""
        tiles = [torch.split(pixels, 1) if self.config.frames == 1 else (pixels,) for pixels, _ in images]
        pictures = [tile for own in tiles for tile in own]
        grids = [self.grid(pixels) for pixels in pictures]
        taken: dict[int, Tensor] = {}
        joined = self.config.merge**2

        def behind(layer: int, hidden: Tensor) -> None:
            progress()
            if layer in self.config.taps:
                k = self.config.taps.index(layer)
                taken[1 + k] = self.deep[k](hidden, joined)

        run = computed or self._computed
        inputs, axes = self.embedded(pictures, grids), self.axes(grids)
        order = self._by_windows(grids)
        if order is not None:
            inputs, axes = inputs[order.patches], axes[:, order.patches]
        spans = [[grid.n for grid in grids]] * len(self.plan) if order is None else order.spans
        taken[0] = self.merger(run(inputs, axes, spans, behind), joined)
        if order is not None:
            taken = {k: features[order.back] for k, features in taken.items()}
        features, found, at = torch.stack([taken[k] for k in range(1 + len(self.deep))]), list[Tensor](), 0
        for (_, tiling), own in zip(images, tiles, strict=True):
            of_image, grids = grids[: len(own)], grids[len(own) :]
            n = sum(grid.n for grid in of_image) // joined
            found.append(self._written(features[:, at : at + n], of_image, tiling))
            at += n
        return found

    def _written(self, features: Tensor, grids: Sequence[Grid], tiling: tuple[int, int]) -> Tensor:
        """Features [1 + deep, n, hidden] of a picture, with the embeddings of what stands between them."""
        writing, between, merge = self.config.writing, self.between, self.config.merge
        if writing is None or between is None:
            return features.clone()  # a view would keep the features of the whole step
        places, at = {token: features.shape[1] + k for k, token in enumerate(writing.tokens)}, 0
        order = list[int]()
        for one in writing.of([(grid.rows // merge, grid.columns // merge) for grid in grids], tiling):
            order += [places[one]] if one >= 0 else range(at, at - one)
            at -= min(one, 0)
        return torch.cat([features[0], between])[torch.tensor(order, device=between.device)][None]

    @property
    def plan(self) -> Sequence[Layer]:
        return self.config.plan.layers

    @property
    def layers(self) -> Sequence[LayerWeights]:
        return self.stack.layers

    def _computed(self, hidden: Tensor, axes: Tensor, spans: Spans, behind: Behind) -> Tensor:
        return self.stack.forward(hidden, Forward(axes, WholeAttention(spans, self.plan), behind=behind))

    def _by_windows(self, grids: Sequence[Grid]) -> Windows | None:
        """The patches, window by window. None without windows."""
        config, joined = self.config, self.config.merge**2
        if not config.window:
            return None
        order, lengths, begin = [], list[int](), 0
        for grid in grids:
            rows, columns = grid.rows // config.merge, grid.columns // config.merge
            blocks = torch.arange(begin, begin + rows * columns).view(rows, columns)
            for band in torch.split(blocks, config.window):
                for window in torch.split(band, config.window, dim=1):
                    order.append(window.flatten())
                    lengths.append(joined * window.numel())
            begin += rows * columns
        blocks, whole = torch.cat(order), [grid.n for grid in grids]
        patches = (blocks[:, None] * joined + torch.arange(joined)).flatten()
        place = self.values.device
        spans = [whole if i in config.whole else lengths for i in range(len(self.plan))]
        return Windows(patches.to(place), blocks.argsort().to(place), spans)

    def grid(self, pixels: Tensor) -> Grid:
        return Grid(pixels.shape[1] // self.config.patch, pixels.shape[2] // self.config.patch)

    def embedded(self, images: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
        """[T, hidden], the inputs of the layers."""
        x = self.patches(torch.cat([self._values_of(pixels) for pixels in images]).to(self.dtype))
        if self.first_norm is not None and (norm := self.plan[0].mixer_norm) is not None:
            x = normed(norm, self.first_norm, x, self.stack.kernels)
        if self.positions is None:
            return x
        positions = (self._in_blocks(self.positions.of(grid.rows, grid.columns)) for grid in grids)
        return x + torch.cat(list(positions)).to(x.dtype)

    def axes(self, grids: Sequence[Grid]) -> Tensor:
        """int64 [2, T]: the row and the column of each patch."""
        place, found = self.values.device, []
        for grid in grids:
            at = self._in_blocks(torch.arange(grid.n, device=place).view(grid.rows, grid.columns))
            found.append(torch.stack([at // grid.columns, at % grid.columns]))
        return torch.cat(found, dim=1)

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def working_bytes(self, n_patches: int) -> int:
        """Memory of the largest tensors that live at once."""
        dense = self.config.plan.layers[0].dense
        return n_patches * (5 * self.config.hidden + 2 * dense.inner) * self.dtype.itemsize

    def _in_blocks(self, grid: Tensor) -> Tensor:
        """[rows, columns, ...] -> [rows * columns, ...], block by block."""
        merge, (rows, columns) = self.config.merge, grid.shape[:2]
        split = grid.view(rows // merge, merge, columns // merge, merge, *grid.shape[2:])
        return split.transpose(1, 2).flatten(0, 3)

    def _values_of(self, pixels: Tensor) -> Tensor:
        """uint8 [1 or frames, height, width, 3] -> float32 [patches, 3 * frames * patch²]. One frame stands for
        all."""
        config, grid = self.config, self.grid(pixels)
        cut = pixels.view(-1, grid.rows, config.patch, grid.columns, config.patch, 3).permute(1, 3, 0, 2, 4, 5)
        of_patch = self._in_blocks(cut).permute(0, 4, 1, 2, 3)  # [patches, colour, frame, row, column]
        first = torch.arange(3, device=pixels.device).view(1, 3, 1, 1, 1) * 256
        values = self.values.flatten()[of_patch.long() + first]
        return values.expand(-1, -1, config.frames, -1, -1).flatten(1)


@dataclass(frozen=True, slots=True)
class WholeAttention:
    """Implements `StepAttention`: the positions of a run see each other, and no others."""

    spans: Spans
    plan: Sequence[Layer]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
        distances: Distances | None = None,
    ) -> Tensor:
        assert k is not None
        assert v is not None
        q, k = rotated(q, k, rotation)
        assert k is not None
        parts, scale = [], self.plan[layer].attention.scale
        for own in zip(*(torch.split(x, list(self.spans[layer])) for x in (q, k, v)), strict=True):
            queries, keys, values = (x.transpose(0, 1)[None] for x in own)
            seen = F.scaled_dot_product_attention(queries, keys, values, scale=scale, enable_gqa=True)
            parts.append(seen[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)
