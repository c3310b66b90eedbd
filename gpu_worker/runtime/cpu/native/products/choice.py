"""`choose_products` measures for how many rows the C kernels are quicker, and for how many torch's library is.

No kernel is the quickest on every processor. So when a model with weights in bfloat16 is loaded, both are timed on
its own matrices, for each kind of map and a ladder of row counts, in about half a second. The times are kept
beside the compiled C kernels. The times decide, for each kind of map, from how many rows on torch's
library is used. Both are timed by the processor time of one thread, which is meaningful on a busy machine, too.

The C kernels sum each output in one order, whatever else is in the batch; the library does not. So the library
gives up "the same bits in any batch". It is used only if some step becomes quicker by more than a fifth. With
`PETIOLE_EXACT=on` it is never used; with `off`, the quickest is used for each number of rows.
`PETIOLE_PRODUCTS=own` or `library` measures nothing, and uses the C kernels or torch's library for all rows."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear, Linear
from petiole.gpu_worker.models.weights.names import LinearName
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from petiole.gpu_worker.runtime.cpu.native.products.library import BLOCKS, NEVER, Library, open_library
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights

log = logging.getLogger(__name__)

Kind = LinearName | Literal["head"]
Times = dict[str, dict[int, tuple[float, float]]]
"""By kind of map and number of rows: seconds of all such maps of a step, by the C kernels and by the library."""

RUNGS = (1, 4, 16, 64, 256)
WORTH_IT = 1.2
"""How many times quicker a step must become for the library to be worth bits that depend on the batch."""
_MOST_HEAD_ROWS = 16  # a prefill needs few rows of logits
_SAMPLE_WEIGHTS = 4 << 20  # weights of one matrix; of a larger matrix only the first outputs are timed
_COLD_BYTES = 64 << 20  # few rows read weights from memory: read this much between two visits of the same weights
_ROUNDS = 3
_TIME_LIMIT_S = 10.0  # for measuring at start-up on a busy machine
_TOLERANCE = 0.02  # largest difference, relative to the largest output: bfloat16 has 8 bits


@dataclass
class Products:
    """`library`: None if the C kernels serve all rows."""

    library: Library | None
    thresholds: Mapping[str, int]

    def library_from(self, kind: Kind) -> int:
        return self.thresholds.get(kind, NEVER) if self.library is not None else NEVER

    def give_up_library(self) -> None:
        log.warning("torch's library failed at a product: from now on the CPU's own kernels compute all products")


@dataclass(frozen=True)
class _Map:
    """One kind of linear map: `count` matrices in a step, the first few of them in `examples`."""

    examples: tuple[Linear, ...]
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.examples[0].weight.shape  # type: ignore[attr-defined]
        return n, k

    @property
    def alike(self) -> bool:
        """Whether all matrices have one shape."""
        return len({one.weight.shape for one in self.examples}) == 1  # type: ignore[attr-defined]


def choose_products(
    native: ctypes.CDLL,
    layers: Sequence[LayerWeights],
    head: Linear | None,
    dtype: torch.dtype,
    *,
    in_part: bool = False,
) -> Products:
    """Decides which kernels compute the products of a model in `dtype`: those of its layers and of its head, if it
    has one. `in_part`: the library may compute some maps even if it cannot compute all of them."""
    forced, exact = switch("products"), switch("exact")
    unit = " on AMX tiles" if dtype == torch.bfloat16 and native.petiole_tiles() else ""

    def own(why: str) -> Products:
        log.info("CPU products: own kernels%s for all rows, %s", unit, why)
        return Products(None, {})

    if exact == "on":
        return own("as PETIOLE_EXACT says")
    if forced == "own":
        return own("as PETIOLE_PRODUCTS says")
    maps = _maps(layers, head)
    if any(isinstance(one, CodedLinear) for m in maps.values() for one in m.examples):
        return own("because torch's library does not multiply codes")
    if dtype != torch.bfloat16 or not all(_is_dense(m) for m in maps.values()):
        return own("because torch's library would be used only for weights in bfloat16")
    if not all(m.alike for m in maps.values()):
        return own("because the layers have different sizes")
    library = open_library()
    if library is None:
        return own("because torch's library has no products of packed weights")
    n_maps, maps = len(maps), {kind: m for kind, m in maps.items() if library.takes(*m.shape)}
    if not maps or (len(maps) < n_maps and not in_part):
        return own("because torch's library orders such weights in another way")
    if forced == "library":
        log.info("CPU products: torch's library for all rows, as PETIOLE_PRODUCTS says")
        return Products(library, dict.fromkeys(maps, 1))
    began = time.perf_counter()
    file = _file(native, maps)
    times = _read(file)
    known = times is not None
    if times is None:
        times = _measure(native, library, maps)
        if times is None:
            return own("because the machine is too busy to measure others")
        _write(file, times)
    thresholds = decide(times, exact)
    took = "as measured before" if known else f"measured in {time.perf_counter() - began:.2f} s"
    log.info("CPU products, %s: %s", took, describe(times, thresholds, unit))
    return Products(library, thresholds) if thresholds else Products(None, {})


def decide(times: Times, exact: str) -> dict[str, int]:
    """The number of rows from which the library serves, for each kind of map that it should serve."""
    thresholds = {}
    for kind, by_rows in times.items():
        rungs = sorted(by_rows)
        regret = {start: sum(by_rows[r][r >= start] / min(by_rows[r]) for r in rungs) for start in (*rungs, NEVER)}
        thresholds[kind] = min(regret, key=lambda start: (regret[start], -start))
    thresholds = {kind: start if start > RUNGS[0] else 1 for kind, start in thresholds.items() if start < NEVER}
    if exact != "off" and gain(times, thresholds) <= WORTH_IT:
        return {}
    return thresholds


def gain(times: Times, thresholds: Mapping[str, int]) -> float:
    """How many times quicker the maps of a step become, in the best case."""
    most = 1.0
    for rows in RUNGS if times else ():
        alone = chosen = 0.0
        for kind, by_rows in times.items():
            at = rows if rows in by_rows else min(by_rows)  # a long prompt has one row of logits
            own, library = by_rows[at]
            alone += own
            chosen += library if at >= thresholds.get(kind, NEVER) else own
        most = max(most, alone / chosen)
    return most


def describe(times: Times, thresholds: Mapping[str, int], unit: str = "") -> str:
    """unit: what the own kernels multiply on, if that is not usual."""
    if not thresholds:
        possible = gain(times, decide(times, "off"))
        return (
            f"own kernels{unit} for all rows, the same bits in any batch "
            f"(with torch's library a step would be {possible:.2f} times quicker at most)"
        )
    parts = [
        f"{kind} from {thresholds[kind]} row{'s' * (thresholds[kind] > 1)}" for kind in times if kind in thresholds
    ]
    return (
        f"torch's library for {', '.join(parts)}, own kernels{unit} for the rest: "
        f"up to {gain(times, thresholds):.2f} times quicker than own kernels alone; "
        "bits depend on the batch (not with PETIOLE_EXACT=on)"
    )


def described(layers: Sequence[LayerWeights], head: Linear | None) -> list[str]:
    """How the weights of linear maps are kept, and how many bytes of each kind there are."""
    n_bytes: Counter[str] = Counter()
    linears = [one for m in _maps(layers, head).values() for one in m.examples]
    for experts in (layer.experts for layer in layers if layer.experts is not None):
        linears += [experts.gate_up.whole, experts.down.whole]
    for linear in linears:
        if isinstance(linear, CodedLinear):
            inputs = " beside inputs rounded to int8" if linear.int8_inputs else ""
            n_bytes[f"{linear.weight.form}{inputs}"] += linear.weight.n_bytes
        elif isinstance(linear, DenseLinear | Int8Linear):
            n_bytes[str(linear.weight.dtype).removeprefix("torch.")] += linear.weight.nbytes
    return [f"{kind} ({total / 1e6:.0f} MB)" for kind, total in n_bytes.most_common()]


# -- measuring


def _maps(layers: Sequence[LayerWeights], head: Linear | None) -> dict[Kind, _Map]:
    n = len(layers)
    maps: dict[Kind, _Map] = {
        "qkv": _Map(tuple(layer.mixer.first for layer in layers), n),
        "out": _Map(tuple(layer.mixer.out for layer in layers), n),
    }
    if dense := [layer.feed_forward for layer in layers if layer.feed_forward is not None]:
        maps["gate_up"] = _Map(tuple(one.gate_up for one in dense), len(dense))
        maps["down"] = _Map(tuple(one.down for one in dense), len(dense))
    if head is not None:
        maps["head"] = _Map((head,), 1)
    return maps


def _is_dense(m: _Map) -> bool:
    return all(isinstance(linear, DenseLinear) and linear.weight.dtype == torch.bfloat16 for linear in m.examples)


def _measure(native: ctypes.CDLL, library: Library, maps: Mapping[Kind, _Map]) -> Times | None:
    """The times; None if measuring takes too long, empty if a product of the library differs."""
    n_threads, give_up = torch.get_num_threads(), time.monotonic() + _TIME_LIMIT_S
    times: Times = {}
    try:
        torch.set_num_threads(1)
        for kind, m in maps.items():
            bench = _Bench(native, library, m)
            if not bench.agree():
                log.warning("torch's library multiplies packed weights %s differently: it is not used", [*m.shape])
                return {}
            times[kind] = {}
            for rows in RUNGS:
                if kind != "head" or rows <= _MOST_HEAD_ROWS:
                    times[kind][rows] = bench.time(rows)
                if time.monotonic() > give_up:
                    return None
    finally:
        torch.set_num_threads(n_threads)
    return times


class _Bench:
    """Copies of a kind's matrices, or of their first outputs, that both sides multiply with."""

    def __init__(self, native: ctypes.CDLL, library: Library, m: _Map) -> None:
        self._native, self._library = native, library
        native.petiole_linear_scratch.restype = c_int64
        n, self._k = m.shape
        self._n = min(n, max(BLOCKS[-1], _SAMPLE_WEIGHTS // self._k // BLOCKS[-1] * BLOCKS[-1]))
        self._scale = m.count * n / self._n
        n_copies = max(1, min(len(m.examples), _COLD_BYTES // (2 * self._n * self._k)))
        self._weights = Weights(native, library)
        self._linears = []
        for linear in m.examples[:n_copies]:
            assert isinstance(linear, DenseLinear)
            self._linears.append(self._weights.linear(DenseLinear(linear.weight[: self._n].clone()), 1))
        rows = max(RUNGS)
        self._x = torch.linspace(-1, 1, rows * self._k).sin().view(rows, self._k)
        self._y = torch.empty(rows, self._n)
        self._halves = torch.empty(rows, self._k, dtype=torch.bfloat16)
        self._stride = native.petiole_linear_scratch(ctypes.byref(self._linears[0]), c_int64(rows))
        self._scratch = torch.empty(self._stride // 4)

    def agree(self) -> bool:
        """Whether both compute the same product from the same memory."""
        if not all(linear.library for linear in self._linears):
            return False
        own, theirs = self._product(4, NEVER).clone(), self._product(4, 1)
        return bool((own - theirs).abs().max() <= _TOLERANCE * own.abs().max())

    def time(self, rows: int) -> tuple[float, float]:
        """Seconds of all maps of this kind in a step: by the C kernels, by the library."""
        best = [float("inf")] * 2
        linears = self._linears if rows <= 16 else self._linears[:1]
        for _ in range(_ROUNDS if rows <= 16 else 2):
            for i, library_from in enumerate((NEVER, 1)):
                began = time.thread_time()
                for linear in linears:
                    self._run(linear, rows, library_from)
                best[i] = min(best[i], time.thread_time() - began)
        return best[0] * self._scale / len(linears), best[1] * self._scale / len(linears)

    def _product(self, rows: int, library_from: int) -> torch.Tensor:
        self._run(self._linears[0], rows, library_from)
        return self._y.view(-1)[: rows * self._n].view(rows, self._n)

    def _run(self, linear: ctypes.Structure, rows: int, library_from: int) -> None:
        linear.library_from = library_from
        self._native.petiole_linear(
            c_void_p(self._library.address),
            ctypes.byref(linear),
            c_int64(rows),
            c_void_p(self._x.data_ptr()),
            c_void_p(self._y.data_ptr()),
            c_void_p(self._halves.data_ptr()),
            c_void_p(self._scratch.data_ptr()),
            c_int64(self._stride),
            c_int32(1),
        )


# -- the file of times


def _file(native: ctypes.CDLL, maps: Mapping[Kind, _Map]) -> Path:
    """The file of the times, beside the compiled library, whose name identifies the processor."""
    compiled = Path(native._name)
    asked = [torch.__version__, RUNGS, [(kind, m.shape, m.count) for kind, m in maps.items()]]
    key = hashlib.sha256(repr(asked).encode()).hexdigest()[:12]
    return compiled.with_name(f"{compiled.stem}-products-{key}.json")


def _read(file: Path) -> Times | None:
    try:
        found = json.loads(file.read_text())
        times = {
            str(kind): {int(rows): (float(own), float(library)) for rows, (own, library) in by_rows.items()}
            for kind, by_rows in found.items()
        }
        return times if all(times.values()) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(file: Path, times: Times) -> None:
    try:
        scratch = file.with_name(f"{file.name}.{os.getpid()}")
        scratch.write_text(json.dumps(times))
        scratch.replace(file)
    except OSError as error:
        log.info("the measured times cannot be saved: %s", error)
