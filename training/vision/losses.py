"""How wrong a model is about where something is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from training.vision.pictures import COLORS, KINDS, MOST, Scene, cells, number_of

NEAR = 12.0
"""The width of a number's target, in numbers of about a thousand for a whole side."""
KNOWN = 4 + (1 + MOST) + (1 + len(COLORS) * len(KINDS))
"""What a position of a picture learns to say: a box, the place of a shape, its name."""


@dataclass(frozen=True)
class Covered:
    """What covers pictures. cells: int64 [N, rows * columns], as `pictures.cells` has them; by such a place,
    names: int64 [N, 1 + MOST], the numbers of the shapes, and boxes: float32 [N, 1 + MOST, 4], their centres and
    sizes."""

    cells: Tensor
    names: Tensor
    boxes: Tensor

    @staticmethod
    def of(scenes: Sequence[Scene], rows: int, columns: int) -> Covered:
        names, boxes = [], []
        for scene in scenes:
            absent = MOST - len(scene.shapes)
            names.append([0, *map(number_of, scene.shapes), *[0] * absent])
            own = [(s.x, s.y, s.width, s.height) for s in scene.shapes]
            boxes.append([(0.0,) * 4, *own, *[(0.0,) * 4] * absent])
        covered = [cells(scene, rows, columns) for scene in scenes]
        return Covered(torch.tensor(covered), torch.tensor(names), torch.tensor(boxes))


def seen(found: Tensor, covered: Covered) -> Tensor:
    """How wrong the positions of pictures are about what covers them. found: [N, positions, KNOWN]."""
    box, place, name = found.split([4, 1 + MOST, KNOWN - 5 - MOST], dim=-1)
    places = covered.cells
    names = covered.names.gather(1, places)
    boxes = covered.boxes[torch.arange(len(found))[:, None], places]
    wrong = F.cross_entropy(name.flatten(0, 1), names.flatten())
    wrong = wrong + F.cross_entropy(place.flatten(0, 1), places.flatten())
    return wrong + 4 * (box - boxes)[places > 0].abs().mean()


def off(found: Tensor, wanted: Tensor) -> Tensor:
    """Two losses of logits [n, k, numbers] for numbers [n, k]: cross entropy to a near miss' share, above the
    least possible, and the distance of the expected number."""
    shares = nearby(wanted.flatten(), found.shape[-1])
    chances = found.flatten(0, 1).log_softmax(-1)
    expected = (chances.exp() * torch.arange(found.shape[-1])).sum(-1)
    divergence = (shares * (shares.clamp(min=1e-20).log() - chances)).sum(-1).mean()
    return divergence + (expected - wanted.flatten()).abs().mean() * 10 / found.shape[-1]


def nearby(wanted: Tensor, n: int) -> Tensor:
    """float32 [len(wanted), n]: most of the weight on the wanted number, less on its neighbours."""
    distance = (torch.arange(n)[None, :] - wanted[:, None]).float() / NEAR
    return torch.softmax(-(distance**2) / 2, dim=-1)
