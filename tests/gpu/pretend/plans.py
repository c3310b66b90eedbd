"""FlashInfer's plans for captured steps, over a pretended card: `python -m tests.gpu.pretend python -m
tests.gpu.pretend.plans [--vectors N] [--window W]`.

A graph repeats the launches that it was captured with. So whatever the lengths of a batch, a plan for its replay
must ask for the same ones: the same grid, the same tile, the same places in the workspace. This plans batches of
random lengths, for every size of the ladder, and compares. A plan for which the workspace is too small raises.

Fails if a plan differs. Without windows only FlashInfer's modules for bfloat16 and heads of 64 and 128 are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import torch

from bench.checkpoints import Shape, config
from petiole.gpu_worker.models.config import ModelConfig, parse_decoder_config
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    DecodeWrappers,
    Geometry,
    batch_ladder,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.device.interface import staged
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache

HEADS = ((16, 8, 128), (32, 8, 128), (64, 8, 128), (5, 1, 64), (8, 1, 128), (2, 2, 64), (14, 2, 64))
"""Of queries, of keys, and their width: groups of 1, 2, 4, 5, 7 and 8."""

LONGEST = 16_384
QUERIES = (1, 2, 6)
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vectors", type=int, default=40, help="of lengths, for each captured step (default 40)")
    parser.add_argument("--window", type=int, default=0, help="of the attention; 0: none")
    options = parser.parse_args()
    n, differing, plans = 0, 0, 0
    print(f"seed {SEED}")
    for heads in HEADS:
        for page_size in (1, 16):
            geometry = pages_of(model_of(heads, options.window), page_size)
            workspace = new_workspace(geometry.device)
            for size in batch_ladder((), 256):
                indices = torch.zeros(size * -(-LONGEST // page_size), dtype=torch.int32, device=geometry.device)
                for queries in QUERIES:
                    wrappers = DecodeWrappers(geometry, size, workspace, indices, queries)
                    captured = plan(wrappers, [queries] * size, indices)
                    n += 1
                    for lengths in drawn(size, queries, options.vectors):
                        plans += 1
                        found = plan(wrappers, lengths, indices)
                        if found != captured:
                            differing += 1
                            where = f"{heads}, pages of {page_size}, {size} rows of {queries}"
                            print(f"{where}: captured {captured}, then {found} for {sorted(lengths)[-3:]}")
    print(f"{n:,} captured steps, {plans:,} plans, {differing} differ")
    if differing:
        raise SystemExit(1)


def model_of(heads: tuple[int, int, int], window: int) -> ModelConfig:
    n_heads, n_kv_heads, width = heads
    shape = Shape("", "bfloat16", 64, n_heads * width, 64, 1, n_heads, n_kv_heads, width, max_positions=LONGEST)
    return dataclasses.replace(parse_decoder_config(config(shape)), windows=(window,))


def pages_of(model: ModelConfig, page_size: int) -> Geometry:
    cache = new_kv_cache(
        model,
        n_pages=2,
        page_size=page_size,
        rows=1,
        max_model_len=LONGEST,
        dtype=torch.bfloat16,
        device=torch.device("cuda", 0),
    )
    return Geometry(model, cache, torch.bfloat16)


def plan(wrappers: DecodeWrappers, lengths: list[int], indices: torch.Tensor) -> list[int]:
    """The launch that a plan asks for, without what only the card reads."""
    indptr, last = host_page_counts(np.array(lengths, np.int32), wrappers.geometry.cache.page_size)
    device = wrappers.geometry.device
    wrappers.plan(staged(indptr, device), indices[: int(indptr[-1])], staged(last, device))
    (wrapper,) = wrappers.wrappers.values()
    return [int(number) for number in wrapper._plan_info]


def drawn(size: int, least: int, n: int) -> Iterator[list[int]]:
    """Lengths of all kinds: equal, spread, one long row among short ones, few long ones, and mostly padding."""
    draw = random.Random(f"{SEED} {size} {least}")
    yield [least] * size
    yield [LONGEST] * size
    yield [LONGEST, *[least] * (size - 1)]
    for _ in range(n):
        most = draw.choice([least + 1, 64, 512, 4096, LONGEST])
        kind = draw.randrange(4)
        if kind == 0:
            yield [draw.randint(least, most) for _ in range(size)]
        elif kind == 1:
            yield [min(LONGEST, least + int(draw.paretovariate(1.0))) for _ in range(size)]
        elif kind == 2:
            yield [most if draw.random() < 0.05 else draw.randint(least, least + 9) for _ in range(size)]
        else:
            real = draw.randint(1, size)
            yield [draw.randint(least, most) for _ in range(real)] + [least] * (size - real)


if __name__ == "__main__":
    main()
