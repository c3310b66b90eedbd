"""A causal convolution of each channel with a kernel of its own.

A sum of as many products as the kernel has numbers, in one order: a position gets the same bits whatever is
computed with it, and wherever a sequence is cut."""

from __future__ import annotations

from torch import Tensor


def convolved(x: Tensor, before: Tensor, kernel: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: [n, positions, channels]; before: [n, kernel - 1, channels], the inputs before them; kernel: [channels,
    kernel]. Returns float32 [n, positions, channels], and the inputs before the next positions."""
    n, width = x.shape[1], kernel.shape[1]
    inputs, weights = before.new_empty((len(x), width - 1 + n, x.shape[2])), kernel.float()
    inputs[:, : width - 1], inputs[:, width - 1 :] = before, x
    wide = inputs.float()
    total = wide[:, :n] * weights[:, 0]
    for k in range(1, width):
        total += wide[:, k : k + n] * weights[:, k]
    return total if bias is None else total + bias.float(), inputs[:, n:]
