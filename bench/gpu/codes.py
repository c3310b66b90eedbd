"""Products with codes one by one, and the launches of a mixture, against the time to read their bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.card import Card, release, seconds
from bench.harness.checkpoints.random_weights import mxfp4_form
from bench.harness.report import Report
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import FeedForward, Norm, Router
from petiole.gpu_worker.models.weights.linear import Fp8Linear, Linear
from petiole.gpu_worker.models.weights.quantization import GROUP, int4_form
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout, KernelLinear
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.device.cuda import CudaDevice

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (24_576, 4096), "down": (4096, 12_288)}
"""Outputs and inputs of the products of a layer of Qwen3-8B."""
AT_LEAST = 2**28
"""Bytes of the copies of a weight: what was read a round ago is in no cache."""
MIXTURE = Router(128, 8, normalised=True)
HIDDEN, INNER = 2048, 768  # Qwen3-30B-A3B


LAYERS = 4
"""One after another: their weights are more than a card's cache holds."""
KINDS: dict[str, Callable[[int, int], CodeLayout]] = {
    "int4": int4_form,
    "mxfp4": mxfp4_form,
    "fp8": lambda outputs, inputs: CodeLayout(outputs, inputs, inputs, codes=torch.float8_e4m3fn),
}
TARGETS = {("int4", 1): 66.0, ("int4", 16): 80.0, ("int4", 64): 130.0}
"""Microseconds of the four products of a layer, with what stands between them but attention."""


def coding(report: Report, card: Card) -> None:
    """Layers of four products, with their norms, which decide; then each product by each kernel."""
    for kind, form_of in KINDS.items():
        floor = sum(form_of(*shape).n_bytes for shape in SHAPES.values()) / card.bandwidth
        for way, layers in (("usual kernels", usual_layers), ("fused products", fused_layers)):
            weights_of_layers = [layer_of(form_of, way) for _ in range(LAYERS)]
            for rows in (1, 16, 64):
                x = normal(rows, HIDDEN_8B)
                took = seconds_of_each([partial(layers, x, weights_of_layers)]) / LAYERS
                target = TARGETS.get((kind, rows)) if way == "fused products" else None
                report.add(
                    f"{kind}, a layer without attention, {rows} rows, {way} ({floor * 1e6:.0f} us of bytes)",
                    took * 1e6,
                    "us",
                    target=target,
                    better="lower",
                )
            del weights_of_layers
            release()
    for kind, form_of in KINDS.items():
        for name, (outputs, inputs) in SHAPES.items():
            weights, plain = copies(form_of(outputs, inputs)), normals(outputs, inputs)
            for rows in (1, 16, 64, *([128] if kind != "fp8" else [])):
                x = normal(rows, inputs)
                beside = seconds_of_each([partial(torch.mm, x, w.t()) for w in plain])
                for way, multiply in ways(kind, rows, outputs).items():
                    took = seconds_of_each([partial(multiply, x, w) for w in weights])
                    report.add(
                        f"{kind}, {name}, {rows} rows, {way}, beside cuBLAS's in bf16",
                        took * 1e6,
                        "us",
                        peer=beside * 1e6,
                        floor=weights[0].n_bytes / card.bandwidth * 1e6,
                        better="lower",
                    )
            del weights, plain
            release()
    mixing(report, card)
    beside_humming(report, card)


def beside_humming(report: Report, card: Card) -> None:
    """Last, because it may have to compile, and may not start at all."""
    for name, (outputs, inputs) in SHAPES.items():
        floor = int4_form(outputs, inputs).n_bytes
        for rows in (1, 16, 64):
            try:
                x, n = normal(rows, inputs), -(-AT_LEAST // floor)
                layers = humming_layers(outputs, inputs, rows, n)
                took = seconds_of_each([partial(layer, x) for layer in layers]) if layers else 0.0
            except Exception as error:
                report.absent["humming-kernels"] = f"{type(error).__name__}: {error}"
                return
            if layers:
                report.add(
                    f"int4, {name}, {rows} rows, humming",
                    took * 1e6,
                    "us",
                    floor=floor / card.bandwidth * 1e6,
                    better="lower",
                )
            release()


def humming_layers(outputs: int, inputs: int, rows: int, n: int) -> list[Callable[[Tensor], Tensor]]:
    """So many products of this size by humming-kernels, whose weights differ: int4 in groups as ours, in bfloat16.
    rows: of what they are called with. For each size and number of rows it compiles a kernel, with nvcc or NVRTC.
    Empty where the package is not installed."""
    if importlib.util.find_spec("humming") is None:
        return []
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    found: list[Callable[[Tensor], Tensor]] = []
    for _ in range(n):
        form = {"dtype": "int4", "group_size": GROUP}
        layer = HummingLayer(
            shape_n=outputs, shape_k=inputs, weight_config=form, torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_unquantized(normal(outputs, inputs))
        layer.transform()
        found.append(partial(layer, tuning_config=get_heuristics_config(layer.humming_config, rows)))
    return found


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


Multiply = Callable[[Tensor, Coded], Tensor]


def ways(kind: str, rows: int, outputs: int) -> dict[str, Multiply]:
    """Random codes mean something in every order, so a weight need not be put in another one."""
    from petiole.gpu_worker.runtime.cuda.fused.linear import coded as fused_codes, grouped

    kernels = FlashInferKernels()

    def in_eight_bits(x: Tensor, weight: Coded) -> Tensor:
        return Fp8Linear(weight.codes, weight.scales.view(1, -1), kernels.quantize_rows)(x)

    def in_blocks(block: fused_codes.CodedBlock) -> Multiply:
        return lambda x, weight: fused_codes.multiply(x, tiled(weight), None, block)

    with_torch = kind == "fp8"
    found: dict[str, Multiply] = {
        "today's": in_eight_bits if with_torch else lambda x, w: grouped.multiply(x, w, None)
    }
    if rows > fused_codes.MOST_ROWS:
        return found
    usual = fused_codes.block_for(rows, outputs)
    found["coded products"] = in_blocks(usual)
    for name, blocks in fused_codes.BLOCKS.items() if kind == "int4" else ():
        block = blocks[(rows > 8) + (rows > 16)]
        if block != usual:
            found[f"coded products, {name}"] = in_blocks(block)
    return found


def tiled(weight: Coded) -> Coded:
    return replace(weight, form=replace(weight.form, in_tiles=True)) if weight.form.table else weight


HIDDEN_8B = 4096


def layer_of(form_of: Callable[[int, int], CodeLayout], way: str) -> list[Linear]:
    """Of Qwen3-8B: qkv, out, gate and up, down."""
    found: list[Linear] = []
    for outputs, inputs in SHAPES.values():
        weight, kernels = coded(form_of(outputs, inputs)), FlashInferKernels()
        if not weight.form.table:
            found.append(Fp8Linear(weight.codes, weight.scales.view(1, -1), kernels.quantize_rows))
            continue
        weight = tiled(weight) if way == "fused products" else weight
        found.append(KernelLinear(weight, product=lambda x, w, bias: multiply_by_kernel(x, w)))
    return found


def multiply_by_kernel(x: Tensor, weight: Coded) -> Tensor:
    from petiole.gpu_worker.runtime.cuda.fused.linear import grouped

    return grouped.multiply(x, weight, None)


def usual_layers(x: Tensor, layers: Sequence[Sequence[Linear]]) -> None:
    kernels, residual, norm = FlashInferKernels(), x.clone(), torch.ones_like(x[0])
    y = kernels.rms_norm(residual, norm, 1e-6)
    for qkv, out, up, down in layers:
        mixed = qkv(y)[:, :HIDDEN_8B].contiguous()  # in place of attention's result
        y = kernels.add_rms_norm(out(mixed), residual, norm, 1e-6)
        y = kernels.add_rms_norm(down(kernels.silu_mul(up(y))), residual, norm, 1e-6)


def fused_layers(x: Tensor, layers: Sequence[Sequence[Linear]]) -> None:
    from petiole.gpu_worker.runtime.cuda.fused.linear import decode, split_k

    norm, residual = torch.ones_like(x[0]), x.clone()
    if len(x) <= decode.MOST_ROWS:
        stream = decode.begin(residual, (norm, 1e-6))
        for qkv, out, up, down in layers:
            mixed = decode.product(stream, qkv)[:, :HIDDEN_8B]
            stream = decode.added(mixed, out, stream, (norm, 1e-6))
            stream = decode.added(decode.product(stream, up, gated=True), down, stream, (norm, 1e-6))
        return
    blocks, behind = split_k.blocks_for(x.device), split_k.FusedNorm(Norm(), NormWeights(norm))
    y, _ = split_k.add_norm(residual, None, behind)
    for qkv, out, up, down in layers:
        mixed = split_k.product(y, qkv, blocks)[:, :HIDDEN_8B]
        y, _ = split_k.add_norm(residual, split_k.shares([(mixed, out)], blocks), behind)
        inner = split_k.product(y, up, blocks, FeedForward(0))
        y, _ = split_k.add_norm(residual, split_k.shares([(inner, down)], blocks), behind)


def normals(outputs: int, inputs: int) -> list[Tensor]:
    """Copies of a plain weight."""
    return [normal(outputs, inputs) for _ in range(-(-AT_LEAST // (2 * outputs * inputs)))]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def copies(form: CodeLayout) -> list[Coded]:
    first = coded(form)
    return [first, *(coded(form) for _ in range(AT_LEAST // first.n_bytes))]


def coded(form: CodeLayout) -> Coded:
    """Random codes, in the order in which kernels read them."""
    new = form.empty(lambda shape, dtype: torch.zeros(tuple(shape), dtype=dtype, device="cuda"))
    codes = torch.randint(0, 256, new.codes.shape, dtype=torch.uint8, device="cuda")
    if not form.table:
        codes[codes & 127 == 127] = 0  # no numbers, of eight bits
    new.codes.view(torch.uint8).copy_(codes)
    new.scales.fill_(2.0**-8)
    if new.multiplier is not None:
        new.multiplier.fill_(1.0)
    return replace(new, form=replace(form, in_runs=bool(form.table)))


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
