"""Muon for the matrices of the layers, AdamW for embedding and norms.

Muon replaces the momentum of a matrix by the nearest orthogonal one (a few Newton-Schulz steps), so that rare
directions learn as fast as common ones: on a CPU budget that is worth far more than its cost.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz: matrices [n, rows, columns] with their singular values brought near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = update / (update.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.02
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike = defaultdict[torch.Size, list[Tensor]](list)
            for weight in group["params"]:
                alike[weight.shape].append(weight)
            for shape, weights in alike.items():
                directions = [self._direction(weight, group["momentum"]) for weight in weights]
                update = orthogonal(torch.stack(directions))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for weight, of in zip(weights, update, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(of, alpha=-group["lr"] * scale)

    def _direction(self, weight: Tensor, momentum: float) -> Tensor:
        """Nesterov's: the gradient, in part, and the momentum that it has just joined."""
        assert weight.grad is not None
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(state["momentum"], momentum)


def optimizers(model: nn.Module, matrix_lr: float, other_lr: float) -> list[torch.optim.Optimizer]:
    """Muon over the layers' matrices, AdamW over everything else."""
    matrices = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=matrix_lr),
        torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
