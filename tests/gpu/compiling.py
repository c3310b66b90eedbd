"""The project's Triton kernels compiled for cards that are not here: `python -m tests.gpu.compiling`.

Each kernel is compiled by the function around it, with arguments as a model gives them, and not launched. Prints a
JSON object: for each architecture, kernel and variant what the compiler and the machine code say of it. `--few`:
only the variants in `FEW`, which have every kernel. `--for 80`: only this architecture; it may be repeated.
A process of its own, because Triton settles at its import whether it interprets.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from bench.gpu.card import untimed
from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights, part_of
from petiole.gpu_worker.models.parts.recurrent.states import RUN, Rounded
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import DeltaNet, FeedForward, Norm, Router
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.models.weights.quantization import int4_form
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout
from petiole.gpu_worker.runtime.cuda.fused import accept, adapters, choose, layers, norms as fused_norms, routing
from petiole.gpu_worker.runtime.cuda.fused.linear import coded as fused_codes, decode, grouped, split_k
from petiole.gpu_worker.runtime.cuda.fused.split import attend, pieces as split
from petiole.gpu_worker.runtime.cuda.fused.states import chunks, recurrent as fused_states
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata

VOCAB = 151_936
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


ARCHITECTURES = (80, 86, 89, 90)
"""A100; A10 and 3090; L4 and 4090; H100 and H200."""


@dataclass
class Loop:
    """What one iteration of a kernel's innermost loop does. products: instructions of the tensor cores; waits: for
    these, and for copies; barriers: of a block; narrow: reads of global memory of fewer than 16 bytes a
    thread; copies: those of them that go to shared memory."""

    products: int
    waits: int
    barriers: int
    narrow: int
    copies: int


@dataclass
class Compiled:
    """registers: of a thread; stack: bytes of it in local memory, where spilled registers lie; shared: bytes of a
    block; instructions: of the machine code, executed once or often; waits, early: whether it waits for the kernel
    before it, and reads or writes global memory before that; loop: that with the most products."""

    registers: int
    stack: int
    shared: int
    threads: int
    instructions: int
    waits: bool
    early: bool
    loop: Loop | None


@dataclass
class NoCard:
    """What Triton asks of a driver before it compiles. For each device it keeps what it has compiled, so each
    architecture is a device."""

    architecture: int = ARCHITECTURES[-1]

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


@dataclass
class Compiling:
    """Compiles each kernel that is called, for one architecture at a time, and keeps what came of it."""

    card: NoCard = field(default_factory=NoCard)
    found: dict[str, Compiled] = field(default_factory=dict)
    variant: str = ""

    def run(self, function: Any, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        kernel = call(function, *args, **options | {"warmup": True})
        self.found[f"{function.fn.__name__.lstrip('_')} {self.variant}".strip()] = examined(kernel)

    def overlapped(self, x: Tensor) -> dict[str, bool]:
        return {"OVERLAPPED": True, "launch_pdl": True} if self.card.architecture >= 90 else {"OVERLAPPED": False}

    def of(self, architecture: int, variants: Iterable[str]) -> dict[str, Compiled]:
        self.card.architecture, self.found = architecture, {}
        for self.variant in variants:
            if architecture >= SINCE.get(self.variant, 0):
                VARIANTS[self.variant]()
        return dict(sorted(self.found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--for", dest="architectures", type=int, choices=ARCHITECTURES, action="append")
    options = parser.parse_args()
    compiling, run = Compiling(), JITFunction.run
    driver.set_active(compiling.card)
    JITFunction.run = lambda self, *args, **given: compiling.run(self, run, *args, **given)
    for module in (attend, layers, decode, split_k, fused_codes):
        module.overlapped = compiling.overlapped
    layers.capability = lambda place: divmod(compiling.card.architecture, 10)
    variants = FEW if options.few else VARIANTS
    found = {one: compiling.of(one, variants) for one in options.architectures or ARCHITECTURES}
    every = {one: {name: asdict(kernel) for name, kernel in kernels.items()} for one, kernels in found.items()}
    print(json.dumps(every, indent=1))


def examined(kernel: Any) -> Compiled:
    usage, code = texts(kernel.asm["cubin"])
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    (registers,), (stack,) = (re.findall(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK"))
    places = {name: [i for i, (_, line) in enumerate(lines) if re.search(name, line)] for name in (WAIT, MEMORY)}
    waits = bool(places[WAIT])
    return Compiled(
        registers=int(registers),
        stack=int(stack),
        shared=kernel.metadata.shared,
        threads=kernel.metadata.num_warps * 32,
        instructions=sum(not line.startswith("NOP") for _, line in lines),
        waits=waits,
        early=waits and bool(places[MEMORY]) and places[MEMORY][0] < places[WAIT][0],
        loop=max(loops(lines), key=lambda loop: loop.products, default=None),
    )


def loops(lines: list[tuple[str, str]]) -> Iterator[Loop]:
    """Those that have no other one inside. lines: the address and the instruction of each."""
    at = {int(address, 16): i for i, (address, _) in enumerate(lines)}
    ends = [(at[int(to, 16)], i) for i, (_, line) in enumerate(lines) for to in re.findall(r"\bBRA 0x(\w+)", line)]
    back = [(first, last) for first, last in ends if first < last]
    for first, last in back:
        if any((a, b) != (first, last) and first <= a and b <= last for a, b in back):
            continue
        inside = [line for _, line in lines[first : last + 1]]
        narrow = [line for line in inside if re.search(READ, line) and not re.search(r"\.128\b", line)]
        yield Loop(
            products=sum(bool(re.search(PRODUCT, line)) for line in inside),
            waits=sum(bool(re.search(r"\bDEPBAR\.LE|\bWARPGROUP\.DEPBAR", line)) for line in inside),
            barriers=sum(bool(re.search(r"\bBAR\.", line)) for line in inside),
            narrow=len(narrow),
            copies=sum("LDGSTS" in line for line in narrow),
        )


def texts(cubin: bytes) -> tuple[str, str]:
    """The resources and the machine code of a kernel, kept in Triton's cache: the disassembler takes 0.4 s."""
    manager = get_cache_manager(hashlib.sha256(TOOL.read_bytes() + cubin).hexdigest())
    if kept := manager.get_file("texts.json"):
        usage, code = json.loads(Path(kept).read_text())
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage, code = output("--dump-resource-usage", file.name), output("-sass", file.name)
        manager.put(json.dumps([usage, code]), "texts.json", binary=False)
    return usage, code


WAIT = r"\bACQBULK\b"
READ = r"\b(LDG|LDGSTS)\."
PRODUCT = r"\b(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA)\."
MEMORY = r"\b(LDG|STG|LD|ST|LDGSTS|UBLKCP|RED|ATOM|ATOMG)\b"


def output(*arguments: str) -> str:
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------- as a model calls them


def draw(dtype: torch.dtype, short: bool = False) -> None:
    n = 64
    half = torch.full((n,), 0.5)
    choice = SamplingMetadata(
        half, torch.zeros((n, 2), dtype=torch.int32), torch.ones(n, dtype=torch.int64), half, half
    )
    with untimed("rows" if short else "off"):
        choose.choose(torch.empty((n, VOCAB), dtype=dtype), choice)


def heads(width: int, normed: bool, dtype: torch.dtype, near: bool = False) -> None:
    n, n_heads, n_kv_heads = 16, 16, 8
    q, k, v = (torch.empty((n, many, width), dtype=torch.bfloat16) for many in (n_heads, n_kv_heads, n_kv_heads))
    norms = (torch.empty(width, dtype=torch.bfloat16),) * 2 if normed else None
    rotation = Rotation(norms, 1e-6, torch.zeros(n, dtype=torch.int32), torch.empty(4096, width), near)
    keys, values = (torch.empty((4096, n_kv_heads, width), dtype=dtype) for _ in range(2))
    layers.rotate_and_store(q, k, v, rotation, keys, values, torch.zeros(n, dtype=torch.int64))


def latents() -> None:
    """Of DeepSeek and GLM-4.7-Flash."""
    n, width = 16, 576
    q, k = (torch.empty((n, many, width), dtype=torch.bfloat16) for many in (16, 1))
    rotation = Rotation(None, 0.0, torch.zeros(n, dtype=torch.int32), torch.empty(4096, 64), True)
    keys = torch.empty((4096, 1, width), dtype=torch.bfloat16)
    layers.rotate_and_store(q, k, None, rotation, keys, keys, torch.zeros(n, dtype=torch.int64))


def split_rows(
    heads: int,
    kv_heads: int,
    width: int,
    stored: torch.dtype = torch.bfloat16,
    queries: int = 1,
    page_size: int = 1,
    softcap: float = 0.0,
    summed: bool = False,
) -> None:
    """64 rows of at most 32,768 positions."""
    rows, longest = 64, 32_768
    indptr, last = (torch.zeros(n, dtype=torch.int32) for n in (rows + 1, rows))
    pieces = split.Pieces.empty(rows, longest, indptr.device)
    attend.cut(indptr, last, page_size, 0, queries, pieces)
    q = torch.empty((rows * queries, heads, width), dtype=torch.bfloat16)
    keys = torch.empty((4096 // page_size, page_size, kv_heads, width), dtype=stored)
    parts, sums = torch.empty(1), torch.empty(q.shape[:2]) if summed else None
    scores = width**-0.5, 0, softcap
    kind = split.SplitLayers(heads, kv_heads, width, *scores, queries, page_size, last, pieces, parts, parts, 396)
    attend.attend(kind, q, (keys, keys), torch.empty_like(q), sums)


def pages() -> None:
    tables = torch.empty((2, 65, 4096), dtype=torch.int32)
    rows, indptr = (torch.zeros(n, dtype=torch.int32) for n in (64, 65))
    layers.write_pages(tables, rows, rows, torch.zeros((2, 64), dtype=torch.int32))
    layers.gather_pages(tables[0], rows, rows, indptr, torch.empty(2**18, dtype=torch.int32))
    layers.token_slots(tables, rows, rows, 1)


def eight_bits() -> None:
    layers.quantize_rows(torch.empty((64, 4096), dtype=torch.bfloat16))


def accepted() -> None:
    values = torch.zeros((65, 3), dtype=torch.int32)
    pending = PendingInputs(torch.zeros(65, dtype=torch.int64), values)
    tokens, drafts = torch.zeros(16, dtype=torch.int64), torch.zeros(3 * 4 + 16, dtype=torch.int64)
    accept.accept(tokens, values[:16], drafts, 4, pending)


def terms() -> None:
    hidden, outputs, rank = 1024, (2048, 1024, 1024), 16
    x, y = torch.empty((16, hidden), dtype=torch.bfloat16), torch.empty((16, 4096), dtype=torch.bfloat16)
    a = torch.empty((5, 3 * rank, hidden), dtype=torch.bfloat16)
    b = [torch.empty((5, n, rank), dtype=torch.bfloat16) for n in outputs]
    adapters.add_terms(x, y, a, b, *(torch.zeros(n, dtype=torch.int32) for n in (16, 5)))


def states(heads: int, rounded: bool, grouped: bool = False) -> None:
    """Of Qwen3.5, and of Qwen3-Next: heads of 128, a kernel of four."""
    rows, n, net = 8, 64, DeltaNet(16, heads, 128, 128, 4, Norm(), grouped=grouped)
    places, bounds, of, copies = (torch.zeros(many, dtype=torch.int32) for many in (rows, rows + 1, n, n))
    kernel, norm = (torch.empty(size, dtype=torch.bfloat16) for size in ((net.channels, 4), (128,)))
    inputs = torch.empty((16, 3, net.channels), dtype=torch.bfloat16)
    nothing = DenseLinear(kernel)
    weights = DeltaNetWeights(nothing, nothing, kernel, *torch.empty((2, heads)), NormWeights(norm), nothing)
    projected, gates = (
        torch.empty((n, sum(sizes)), dtype=torch.bfloat16) for sizes in (net.input_sizes, net.gate_sizes)
    )
    given = fused_states.prepare(net, weights, projected, gates, inputs, places, bounds, of, copies)
    kept = None
    if rounded:
        numbers = heads * 128 * 128
        kept = Rounded(torch.empty((8, numbers), dtype=torch.int8), torch.empty((8, numbers // RUN)))
    matrices = torch.empty((8, heads, 128, 128))
    step = places, bounds, copies
    outputs = fused_states.apply_delta_rule(*given, matrices, kept, *step)
    chunks.apply_delta_rule_in_chunks(*given, matrices, kept, *step)
    fused_norms.gated_rms_norm(outputs, part_of(projected, net.parts["z"], net.key_heads), norm, 1e-6)


def short() -> None:
    """Of LFM2: 2048 channels, a kernel of three."""
    places, bounds, of, copies = (torch.zeros(many, dtype=torch.int32) for many in (8, 9, 64, 64))
    x, kernel = (torch.empty(size, dtype=torch.bfloat16) for size in ((64, 2048), (2048, 3)))
    inputs = torch.empty((16, 2, 2048), dtype=torch.bfloat16)
    fused_states.convolve(x, kernel, None, inputs, places, bounds, of, copies)


def residual(hidden: int) -> decode.FusedResidual:
    x, norm = torch.empty((16, hidden), dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    return decode.begin(x, (norm, 1e-6))


def dense(outputs: int, inputs: int, biased: bool = False) -> DenseLinear:
    bias = torch.empty(outputs, dtype=torch.bfloat16) if biased else None
    return DenseLinear(torch.empty((outputs, inputs), dtype=torch.bfloat16), bias)


def product(hidden: int, biased: bool = False) -> None:
    decode.product(residual(hidden), dense(2 * hidden, hidden, biased))


def gated(hidden: int, inner: int) -> None:
    decode.product(residual(hidden), dense(2 * inner, hidden), gated=True)


def added(hidden: int, inner: int) -> None:
    x, norm = torch.empty((16, inner), dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
    decode.added(x, dense(hidden, inner), residual(hidden), (norm, 1e-6))


def split_k_layer(
    rows: int, hidden: int, inner: int, blocks: split_k.ProductBlocks | None = None
) -> dict[str, Any]:
    """The four products of a layer with 4096 or 2048 outputs of attention, and the kernel between them."""
    blocks = split_k.blocks_for(torch.device("cpu")) if blocks is None else blocks
    x, wide, mixed = (torch.empty((rows, n), dtype=torch.bfloat16) for n in (hidden, inner, max(hidden, 2048)))
    outputs = mixed.shape[1]
    return {
        "gated": lambda: split_k.product(x, dense(2 * inner, hidden), blocks, FeedForward(inner)),
        "down": lambda: split_k.shares([(wide, dense(hidden, inner))], blocks),
        "qkv": lambda: split_k.product(x, dense(outputs + 2048, hidden), blocks),
        "out": lambda: split_k.shares([(mixed, dense(hidden, outputs))], blocks),
    }


def head(rows: int) -> None:
    x, logits = (torch.empty((rows, n), dtype=torch.bfloat16) for n in (4096, VOCAB))
    split_k.write_logits(x, dense(VOCAB, 4096), logits, torch.empty(rows, dtype=torch.int64))


def add_norms(kind: Literal["rms", "layer"], behind: bool) -> None:
    """Of the 8B's four shares: the norm that follows, or also one behind them, with biases."""
    biased = kind == "layer"
    weight, bias = (torch.empty(4096, dtype=torch.bfloat16) for _ in range(2))
    norm = split_k.FusedNorm(Norm(kind, bias=biased), NormWeights(weight, bias if biased else None))
    x = torch.empty((64, 4096), dtype=torch.bfloat16)
    sums = torch.empty((4, 64, 4096), dtype=torch.float32)
    added = split_k.Shares(sums, (bias,) if biased else (), norm=norm if behind else None)
    split_k.add_norm(x, added, norm)


def coded(form: CodeLayout, rows: int) -> None:
    weight = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    weight = weight.put_in_runs() if form.table else weight
    grouped.multiply(torch.empty((rows, form.inputs), dtype=torch.bfloat16), weight, None)


def tiled(name: str, rows: int, blocks: str) -> Coded:
    """As the fused products read it; those have the blocks of a candidate."""
    form = CODED[name]
    if name == "mxfp4":
        form = replace(form, outputs=4096, inputs=4096)
    weight = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    weight = weight.put_in_runs(in_tiles=True) if form.table else weight
    block = fused_codes.BLOCKS[blocks][(rows > 8) + (rows > 16)]
    x, n = torch.empty((rows, form.inputs), dtype=torch.bfloat16), form.outputs
    norm, squares = torch.empty(n, dtype=torch.bfloat16), torch.empty((16, 256))
    if rows > 16:
        fused_codes.multiply(x, weight, None, block)
    elif n > 4096:
        y = torch.empty((rows, n // 2), dtype=torch.bfloat16)
        fused_codes.launch(block, x, weight, None, y, squares, 1e-6, None, "silu", gated=True)
    else:
        y = torch.empty((rows, n), dtype=torch.bfloat16)
        fused_codes.launch(block, x, weight, None, y, then=(norm, torch.empty_like(y), squares))
    return weight


def norms() -> None:
    x, weight = torch.empty((16, 4096), dtype=torch.bfloat16), torch.empty(4096)
    fused_norms.rms_norm(x, weight, 1e-6)
    fused_norms.rms_norm(x, weight, 1e-6, added=x)


def experts(rows: int, form_of: Callable[[int, int], CodeLayout] | None = None) -> None:
    """Of Qwen3-30B-A3B."""

    def weight(outputs: int, inputs: int) -> Tensor | Coded:
        if form_of is None:
            return torch.empty((outputs, inputs), dtype=torch.bfloat16)
        form = form_of(outputs, inputs)
        coded = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
        return replace(coded, form=replace(form, in_runs=bool(form.table)))

    x = torch.empty((rows, 2048), dtype=torch.bfloat16)
    logits = torch.empty((rows, 128))
    chosen, shares = routing.choose_experts(Router(128, 8, normalised=True), logits, None, None, None)
    pairs = routing.sort_pairs(chosen, torch.zeros(128, dtype=torch.int64))
    inner = grouped.gather_product(x, pairs, weight(128 * 1536, 2048), None)
    outputs = grouped.scatter_product(inner[:, :768], pairs, weight(128 * 2048, 768), None)
    grouped.combined(outputs, pairs, shares)


CODED = {
    "int4": int4_form(12_288, 4096),
    "gptq": CodeLayout(12_288, 4096, 128, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "channels": CodeLayout(12_288, 4096, 4096, SIGNED, scales=torch.bfloat16),
    "nvfp4": CodeLayout(12_288, 4096, 16, E2M1, scales=torch.float8_e4m3fn, multiplier=True),
    "mxfp4": CodeLayout(5760, 2880, 32, E2M1, scales=torch.float8_e8m0fnu),
    "int8": CodeLayout(12_288, 4096, 4096, codes=torch.int8),
    "fp8": CodeLayout(12_288, 4096, 128, codes=torch.float8_e4m3fn),
}


VARIANTS: dict[str, Callable[[], Tensor | None]] = {
    "float32": lambda: draw(torch.float32),
    "bfloat16": lambda: draw(torch.bfloat16),
    "bfloat16, short lists": lambda: draw(torch.bfloat16, short=True),
    **{
        f"of {width}{', normed' * normed}{', into eight bits' * (dtype != torch.bfloat16)}": (
            lambda w=width, n=normed, d=dtype: heads(w, n, d)
        )
        for width in (64, 128)
        for normed in (False, True)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    },
    "of latents": latents,
    "of 32 heads of 128": lambda: split_rows(32, 8, 128),
    "of 16 heads of 128": lambda: split_rows(16, 8, 128),
    "of 32 heads of 128, in eight bits": lambda: split_rows(32, 8, 128, torch.float8_e4m3fn),
    "of 16 heads of 128, in eight bits": lambda: split_rows(16, 8, 128, torch.float8_e4m3fn),
    "of 14 heads of 64, of several queries": lambda: split_rows(14, 2, 64, queries=2, page_size=16),
    "of 64 heads of 64, with sums": lambda: split_rows(64, 8, 64, summed=True),
    "of 8 heads of 256, capped": lambda: split_rows(8, 4, 256, softcap=50.0),
    "": pages,
    "of 4096": eight_bits,
    "with values": accepted,
    "of rank 16": terms,
    "of 2048 channels": short,
    "of 32 heads": lambda: states(32, rounded=False),
    "of 32 heads, grouped": lambda: states(32, rounded=False, grouped=True),
    "of 16 heads, into eight bits": lambda: states(16, rounded=True),
    "normed, 1024": lambda: product(1024),
    "normed, 4096": lambda: product(4096),
    "normed, with a bias, 1024": lambda: product(1024, biased=True),
    "gated, 1024": lambda: gated(1024, 3072),
    "gated, 4096": lambda: gated(4096, 12_288),
    "added, 1024": lambda: added(1024, 3072),
    "added, 4096": lambda: added(4096, 12_288),
    **{
        f"in shares {part}, {hidden}, {rows} rows": lambda r=rows, h=hidden, i=inner, p=part: split_k_layer(
            r, h, i
        )[p]()
        for hidden, inner in ((4096, 12_288), (1024, 3072))
        for rows in (16, 64)
        for part in ("gated", "down", "qkv", "out")
    },
    **{
        f"in shares {part}, {name}": lambda b=blocks, p=part: split_k_layer(64, 4096, 12_288, b)[p]()
        for name, blocks in split_k.BLOCKS.items()
        for part in ("gated", "down")
    },
    **{f"in shares head, {rows} rows": lambda r=rows: head(r) for rows in (1, 64)},
    "rms": lambda: add_norms("rms", behind=False),
    "layer, with biases": lambda: add_norms("layer", behind=False),
    "rms, and behind": lambda: add_norms("rms", behind=True),
    **{
        f"{name}, {rows} rows": lambda f=form, n=rows: coded(f, n)
        for name, form in CODED.items()
        for rows in (1, 64, 300)
    },
    **{
        f"{name}, {blocks}, {rows} rows": lambda n=name, r=rows, b=blocks: tiled(n, r, b)
        for name in CODED
        for blocks in fused_codes.BLOCKS
        for rows in (1, 16, 64)
    },
    "with a weight in float32": norms,
    "of experts, few rows": lambda: experts(16),
    "of experts, many rows": lambda: experts(2048),
    "of experts in int4, few rows": lambda: experts(16, int4_form),
    "of experts in fp8, many rows": lambda: experts(
        2048, lambda n, k: CodeLayout(n, k, k, codes=torch.float8_e4m3fn)
    ),
}

SINCE = {"of 4096": 89}
"""The architectures from which on the engine launches a kernel at all: earlier ones have no eight-bit floats."""

FEW = (
    "bfloat16",
    "bfloat16, short lists",
    "of 128, normed",
    "of 32 heads of 128",
    "of 16 heads of 128, in eight bits",
    "of 8 heads of 256, capped",
    "",
    "of 4096",
    "with values",
    "of rank 16",
    "of 2048 channels",
    "of 32 heads",
    "of 32 heads, grouped",
    "of 16 heads, into eight bits",
    "normed, 1024",
    "gated, 4096",
    "added, 4096",
    "in shares gated, 4096, 64 rows",
    "in shares down, 4096, 64 rows",
    "in shares qkv, 1024, 16 rows",
    "in shares head, 64 rows",
    "layer, with biases",
    "int4, 1 rows",
    "int4, 64 rows",
    "int8, 300 rows",
    "int4, narrow, 1 rows",
    "int4, middle, 16 rows",
    "int4, wide, 64 rows",
    "mxfp4, narrow, 1 rows",
    "fp8, middle, 16 rows",
    "with a weight in float32",
    "of experts, few rows",
)


if __name__ == "__main__":
    main()
