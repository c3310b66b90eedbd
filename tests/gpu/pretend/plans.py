"""FlashInfer's plans for captured steps, over a pretended card: `python -m tests.gpu.pretend python -m
tests.gpu.pretend.plans [--vectors N] [--window W]`.

A graph repeats the launches that it was captured with. So whatever the lengths of a batch, a plan for its replay
must ask for the same ones: the same grid, the same tile, the same places in the workspace. This plans batches of
random lengths, for every shape of the ladders (decodes, verifications, prefills and mixed steps), and compares. A
plan for which the workspace is too small raises.

Fails if a plan differs. Without windows only FlashInfer's modules for bfloat16 and heads of 64 and 128 are needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from bench.harness.checkpoints import decoders as checkpoints
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    AppendWrappers,
    DecodeWrappers,
    Geometry,
    PageList,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.cuda.graphs import new_wrappers, step_lengths
from petiole.gpu_worker.runtime.cuda.shapes import Shape, append_shapes, uniform_shapes
from petiole.gpu_worker.runtime.device.device import staged
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache

HEADS = ((16, 8, 128), (32, 8, 128), (64, 8, 128), (5, 1, 64), (8, 1, 128), (2, 2, 64), (14, 2, 64))
"""Of queries, of keys, and their width: groups of 1, 2, 4, 5, 7 and 8."""

LONGEST = 16_384
QUERIES = (1, 2, 6)
ROWS = 256
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vectors", type=int, default=40, help="of lengths, for each captured step (default 40)")
    parser.add_argument("--window", type=int, default=0, help="of the attention; 0: none")
    options = parser.parse_args()
    n, differing, plans = Counter[str](), 0, Counter[str]()
    print(f"seed {SEED}")
    for heads in HEADS:
        for page_size in (1, 16):
            geometry = pages_of(plan_of(heads, options.window), page_size)
            workspace = new_workspace(geometry.device)
            most = ROWS * -(-LONGEST // page_size)
            indices = torch.zeros(most, dtype=torch.int32, device=geometry.device)
            for shape in shapes():
                wrappers = new_wrappers(geometry, shape, workspace, indices)
                kind = f"rows of {shape.queries}" if shape.queries else "rows of any number of positions"
                n[kind] += 1
                captured = plan(wrappers, *full(shape), indices)
                for queries, lengths in drawn(shape, options.vectors):
                    plans[kind] += 1
                    found = plan(wrappers, queries, lengths, indices)
                    if found != captured:
                        differing += 1
                        print(
                            f"{heads}, pages of {page_size}, {shape}: captured {captured}, then {found} for ",
                            end="",
                        )
                        print(f"{sorted(queries)[-3:]} of {sorted(lengths)[-3:]}")
    for kind in n:
        print(f"{kind}: {n[kind]:,} captured steps, {plans[kind]:,} plans")
    print(f"{differing} differ")
    if differing:
        raise SystemExit(1)


def shapes() -> list[Shape]:
    """Those of an engine on CUDA by default, with mixed steps, and of verifications."""
    config = EngineConfig(prefill_policy="mixed", max_num_seqs=ROWS, chunk_size=512, max_num_batched_tokens=8192)
    uniform = [shape for queries in QUERIES for shape in uniform_shapes(config, queries)]
    return [*uniform, *append_shapes(config, LONGEST)]


def plan_of(heads: tuple[int, int, int], window: int) -> ModelPlan:
    n_heads, n_kv_heads, width = heads
    shape = checkpoints.Shape(
        "", "bfloat16", 64, n_heads * width, 64, 1, n_heads, n_kv_heads, width, max_positions=LONGEST
    )
    plan = model_of(checkpoints.config(shape)).plan
    (layer,) = plan.layers
    return dataclasses.replace(
        plan, layers=(dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window)),)
    )


def pages_of(model: ModelPlan, page_size: int) -> Geometry:
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


Lengths = tuple[list[int], list[int]]
"""Of each row the positions in the step, and those that are cached after it."""


def plan(
    wrappers: DecodeWrappers | AppendWrappers, queries: list[int], lengths: list[int], indices: torch.Tensor
) -> list[int]:
    """The launch that a plan asks for, without what only the card reads."""
    ends, own = np.array(lengths, np.int32), np.array(queries, np.int32)
    _, (indptr,), last = host_page_counts(wrappers.geometry.cache, ends - own, own, ends)
    device = wrappers.geometry.device
    planned = [PageList(staged(indptr, device), indices[: int(indptr[-1])])], staged(last, device)
    if isinstance(wrappers, DecodeWrappers):
        wrappers.plan(*planned)
    else:
        wrappers.plan(staged(np.cumsum([0, *queries], dtype=np.int32), device), *planned)
    (wrapper,) = wrappers.wrappers.values()
    return [int(number) for number in wrapper._plan_info]


def full(shape: Shape) -> Lengths:
    """The step that is captured."""
    _, queries, _ = step_lengths(shape, None)
    return queries.tolist(), queries.tolist()


def drawn(shape: Shape, n: int) -> Iterator[Lengths]:
    """Lengths of all kinds: equal, spread, one long row among short ones, few long ones, and mostly padding."""
    draw = random.Random(f"{SEED} {shape}")
    yield full(shape)
    yield full(shape)[0], [LONGEST] * shape.rows
    yield full(shape)[0], [LONGEST, *full(shape)[0][1:]]
    for _ in range(n):
        queries = [shape.queries] * shape.rows if shape.queries else appended(draw, shape)
        lengths = cached(draw, queries)
        yield queries, [max(pair) if pair[0] else 0 for pair in zip(queries, lengths, strict=True)]


def appended(draw: random.Random, shape: Shape) -> list[int]:
    """Decodes, chunks or both, that fit; rows without any position behind them."""
    real = draw.randint(1, shape.rows)
    queries, left = [1] * real, shape.positions - real
    for i in draw.sample(range(real), draw.randint(0, min(real, 4))):
        more = draw.randint(0, left)
        queries[i] += more
        left -= more
    return queries + [0] * (shape.rows - real)


def cached(draw: random.Random, queries: list[int]) -> list[int]:
    size, least = len(queries), max(queries)
    most = draw.choice([least + 1, 64, 512, 4096, LONGEST])
    most = max(most, least)
    kind = draw.randrange(4)
    if kind == 0:
        return [draw.randint(least, most) for _ in range(size)]
    if kind == 1:
        return [min(LONGEST, least + int(draw.paretovariate(1.0))) for _ in range(size)]
    if kind == 2:
        return [most if draw.random() < 0.05 else draw.randint(n, n + 9) for n in queries]
    real = draw.randint(1, size)
    return [draw.randint(least, most) for _ in range(real)] + queries[real:]


if __name__ == "__main__":
    main()
