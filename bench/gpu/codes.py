"""Products with codes one by one, and the launches of a mixture, against the time to read their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bench.gpu.card import Card, release, seconds
from bench.harness.checkpoints.random_weights import mxfp4_form
from bench.harness.report import Report
from petiole.gpu_worker.models.plan import Router
from petiole.gpu_worker.models.weights.quantization import int4_form
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.device.cuda import CudaDevice

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (24_576, 4096), "down": (4096, 12_288)}
"""Outputs and inputs of the products of a layer of Qwen3-8B."""
AT_LEAST = 2**28
"""Bytes of the copies of a weight: what was read a round ago is in no cache."""
MIXTURE = Router(128, 8, normalised=True)
HIDDEN, INNER = 2048, 768  # Qwen3-30B-A3B


def coding(report: Report, card: Card) -> None:
    from petiole.gpu_worker.runtime.cuda.fused.linear.grouped import multiply

    for kind, form_of in (("int4", int4_form), ("mxfp4", mxfp4_form)):
        for name, (outputs, inputs) in SHAPES.items():
            weights = copies(form_of(outputs, inputs))
            plain = [normal(outputs, inputs) for _ in range(-(-AT_LEAST // (2 * outputs * inputs)))]
            for rows in (1, 16, 64, 128):
                x = normal(rows, inputs)
                took = seconds_of_each([lambda w=w, x=x: multiply(x, w, None) for w in weights])  # type: ignore[misc]
                beside = seconds_of_each([lambda w=w, x=x: torch.mm(x, w.t()) for w in plain])  # type: ignore[misc]
                report.add(
                    f"{kind}, {name}, {rows} rows, beside cuBLAS's in bf16",
                    took * 1e6,
                    "us",
                    peer=beside * 1e6,
                    floor=weights[0].n_bytes / card.bandwidth * 1e6,
                    better="lower",
                )
            del weights, plain
            release()
    mixing(report, card)


def mixing(report: Report, card: Card) -> None:
    """The launches of a layer of experts, of rows that take different ones."""
    from petiole.gpu_worker.runtime.cuda.fused.linear.grouped import combined, gather_product, scatter_product
    from petiole.gpu_worker.runtime.cuda.fused.routing import choose_experts, sort_pairs

    n = MIXTURE.experts
    counts = torch.zeros(n, dtype=torch.int64, device="cuda")
    weights: dict[str, tuple[Tensor | Coded, Tensor | Coded]] = {
        "bf16": (normal(n * 2 * INNER, HIDDEN), normal(n * HIDDEN, INNER)),
        "int4": (coded(int4_form(n * 2 * INNER, HIDDEN)), coded(int4_form(n * HIDDEN, INNER))),
    }
    for rows in (1, 16, 64, 512, 2048):
        x, logits = normal(rows, HIDDEN), torch.randn(rows, n, device="cuda")
        taken, shares = choose_experts(MIXTURE, logits, None, None, None)
        pairs, y = sort_pairs(taken, counts), normal(rows * MIXTURE.chosen, HIDDEN)
        launches: dict[str, Callable[[], object]] = {
            "choose": lambda logits=logits: choose_experts(MIXTURE, logits, None, None, None),  # type: ignore[misc]
            "sort": lambda taken=taken: sort_pairs(taken, counts),  # type: ignore[misc]
            "add": lambda y=y, pairs=pairs, s=shares: combined(y, pairs, s),  # type: ignore[misc]
        }
        for name, work in launches.items():
            report.add(f"experts, {rows} rows: {name}", seconds_of_each([work] * 10) * 1e6, "us", better="lower")
        share = taken.unique().numel() / n
        for kind, (up, down) in weights.items():
            inner = normal(rows * MIXTURE.chosen, INNER)
            products = [
                lambda x=x, p=pairs, w=up: gather_product(x, p, w, None),
                lambda x=inner, p=pairs, w=down: scatter_product(x, p, w, None),
            ]
            n_bytes = sum(w.n_bytes if isinstance(w, Coded) else w.nbytes for w in (up, down))
            report.add(
                f"experts, {rows} rows: both products, {kind}",
                seconds_of_each(products) * len(products) * 1e6,
                "us",
                floor=share * n_bytes / card.bandwidth * 1e6,
                better="lower",
            )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def copies(form: CodeLayout) -> list[Coded]:
    first = coded(form)
    return [first, *(coded(form) for _ in range(AT_LEAST // first.n_bytes))]


def coded(form: CodeLayout) -> Coded:
    """Random codes, in the order in which kernels read them."""
    new = form.empty(lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype, device="cuda"))
    new.codes.copy_(torch.randint(0, 256, new.codes.shape, dtype=torch.uint8, device="cuda"))
    new.scales.fill_(2.0**-8)
    if new.multiplier is not None:
        new.multiplier.fill_(1.0)
    return replace(new, form=replace(form, in_runs=True))


def seconds_of_each(works: Sequence[Callable[[], object]]) -> float:
    """Seconds of one of them, when they are captured one after the other."""

    def all_of_them() -> None:
        with torch.inference_mode():
            for work in works:
                work()

    device = CudaDevice()
    all_of_them()
    device.synchronize()
    return seconds(cuda_capture(device.new_stream("compute"))(all_of_them)) / len(works)
