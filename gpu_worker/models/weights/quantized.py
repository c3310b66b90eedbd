"""Quantised weights in one form, whatever the checkpoint's format was:

    weight = (value of the code - zero) * scale * multiplier, or
    weight = (value of the code * scale + offset) * multiplier

A code has four bits and stands for one of a table's 16 values, or it is a number of six or eight bits.
Neighbouring codes of one output form groups; each group has a scale and, in some formats, a zero. The multiplier
belongs to an output. Scales and offsets may be *steps*: whole numbers of a byte, times a factor that several
groups share. The multiplier is the scale of a whole tensor, and differs between parts that one product computes
together (queries, keys and values; gate and up).

Kernels know this form, and no format. `CodedLinear` is the reference: it computes every form in torch, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import (
    E2M1,
    SIGNED,
    SIX,
    UNSIGNED,
    nibbles,
    of_sixes,
    sixes,
)

RUN = 32
"""Inputs whose codes change places with each other; see `Coded.put_in_runs`."""

TILE = 4 * RUN
"""Inputs whose runs change places with each other in tiles."""

_MOST, _LEAST_PEAK = 127.0, 2.0**-100
_VALUES_AT_ONCE = 2**22
"""So many weights are floats at a time."""


class Allocator(Protocol):
    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """What a weight's parts look like. table: of four-bit codes; empty: there are numbers. codes: the type of
    eight-bit numbers; uint8 holds codes of four or six bits, as `checkpoint.codes` says, unless those of four lie
    `in_runs`, or in runs and `in_tiles`. group: inputs with one scale; the last group may be shorter. scales,
    zeros: their types. multiplier: whether there is one. offsets: zeros are offsets. steps: groups that share a
    factor; 0: scales are numbers."""

    outputs: int
    inputs: int
    group: int
    table: tuple[float, ...] = ()
    codes: torch.dtype = torch.uint8
    scales: torch.dtype = torch.float32
    zeros: torch.dtype | None = None
    multiplier: bool = False
    in_runs: bool = False
    offsets: bool = False
    steps: int = 0
    in_tiles: bool = False

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def in_whole_tiles(self) -> bool:
        """Whether its codes of four bits may lie in tiles."""
        return self.inputs % TILE == 0

    @property
    def n_factors(self) -> int:
        """The number of factors of one output's scales."""
        return -(-self.groups // self.steps) if self.steps else 0

    @property
    def n_bytes(self) -> int:
        """The bytes of such a weight."""
        sizes = self.scales.itemsize + (0 if self.zeros is None else self.zeros.itemsize)
        factors = 2 * self.n_factors * (1 if self.zeros is None else 2)
        return self.outputs * (self.code_bytes + sizes * self.groups + factors + 4 * self.multiplier)

    @property
    def code_bytes(self) -> int:
        """Bytes of one output's codes."""
        return -(-self.inputs * self.bits // 8)

    @property
    def bits(self) -> int:
        return 4 if self.table else 6 if self.codes == torch.uint8 else 8

    def __str__(self) -> str:
        codes = f"codes of {self.bits} bits"
        return (
            f"{codes} in groups of {self.group}"
            if self.group < self.inputs
            else f"{codes} with a scale for each output"
        )

    def of(self, outputs: int) -> CodeLayout:
        """The same form, for another number of outputs."""
        return replace(self, outputs=outputs)

    def empty(self, new: Allocator) -> Coded:
        """Memory for such a weight."""
        n, groups = self.outputs, self.groups
        return Coded(
            form=self,
            codes=new((n, self.code_bytes), self.codes),
            scales=new((n, groups), self.scales),
            zeros=None if self.zeros is None else new((n, groups), self.zeros),
            multiplier=new((n,), torch.float32) if self.multiplier else None,
            factors=new((n, self.n_factors), torch.float16) if self.steps else None,
            zero_factors=new((n, self.n_factors), torch.float16)
            if self.steps and self.zeros is not None
            else None,
        )


def common_form(forms: Sequence[CodeLayout]) -> CodeLayout | None:
    """A form that holds weights of all these forms exactly: their own if they are alike, else six or eight bits.
    None: there is none. The number of outputs is that of the first."""
    first = forms[0]
    if all(form.of(0) == first.of(0) for form in forms):
        return first
    group, codes = min(form.group for form in forms), _common_codes(forms)
    if all(fits_six_bits(form) for form in forms):
        codes = torch.uint8
    aligned = all(form.group == form.inputs or form.group % group == 0 for form in forms)
    offsets = any(form.offsets for form in forms)
    mixed = offsets and any(form.zeros is not None and not form.offsets for form in forms)
    if codes is None or not aligned or mixed:
        return None
    zeros = any(form.zeros is not None for form in forms)
    blocks = {form.steps * form.group for form in forms}
    if len(blocks) == 1 and first.steps:  # blocks of inputs share a factor in all
        steps, kept, of_zeros = blocks.pop() // group, torch.int8, torch.int8
    else:
        same = len({form.scales for form in forms}) == 1 and not any(form.steps for form in forms)
        steps, kept, of_zeros = 0, first.scales if same else torch.float32, torch.float32
    return CodeLayout(
        outputs=first.outputs,
        inputs=first.inputs,
        group=group,
        codes=codes,
        scales=kept,
        zeros=of_zeros if zeros else None,
        multiplier=any(form.multiplier for form in forms),
        offsets=offsets,
        steps=steps,
    )


def plain_form(form: CodeLayout) -> CodeLayout:
    """The nearest form without steps and offsets. A zero in place of an offset is rounded to float32."""
    scales = torch.float32 if form.steps or form.offsets else form.scales
    zeros = torch.float32 if form.offsets else form.zeros
    return replace(form, scales=scales, zeros=zeros, steps=0, offsets=False)


def _common_codes(forms: Sequence[CodeLayout]) -> torch.dtype | None:
    """The type of eight bits that holds what the codes of all forms stand for: integers, or floats with three bits
    of mantissa, which hold the numbers of every table here, too."""
    if all(_is_integer(form) for form in forms):
        return torch.int8
    known = (SIGNED, UNSIGNED, E2M1)
    floats = all(form.table in known or form.codes == torch.float8_e4m3fn for form in forms)
    return torch.float8_e4m3fn if floats else None


def _is_integer(form: CodeLayout) -> bool:
    """Whether its codes stand for integers of eight bits."""
    if not form.table:
        return form.codes != torch.float8_e4m3fn
    return all(number.is_integer() and -128 <= number <= 127 for number in form.table)


def fits_six_bits(form: CodeLayout) -> bool:
    """Whether codes of six bits can stand for its codes."""
    return form.bits == 6 or (form.inputs % 8 == 0 and bool(form.table) and all(one in SIX for one in form.table))


def in_eight_bits(form: CodeLayout) -> CodeLayout | None:
    """A form with codes of eight bits that holds weights of this form exactly; None: there is none."""
    codes = _common_codes([form])
    return None if codes is None else replace(form, table=(), codes=codes)


@dataclass(frozen=True, slots=True)
class Coded:
    """codes: [outputs, code_bytes]; scales, zeros: [outputs, groups]; multiplier: float32 [outputs]; factors of
    scales and of zeros: float16 [outputs, n_factors]."""

    form: CodeLayout
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    multiplier: Tensor | None = None
    factors: Tensor | None = None
    zero_factors: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        every = self.codes, self.scales, self.zeros, self.multiplier, self.factors, self.zero_factors
        return tuple(t for t in every if t is not None)

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, start: int, end: int) -> Coded:
        """Some outputs: views of the same memory."""
        return self._at(slice(start, end), end - start)

    def chosen(self, outputs: Tensor) -> Coded:
        """A copy of some outputs, int64 [n]."""
        return self._at(outputs, len(outputs))

    def _at(self, part: slice | Tensor, n: int) -> Coded:
        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return Coded(
            form=self.form.of(n),
            codes=self.codes[part],
            scales=self.scales[part],
            zeros=of(self.zeros),
            multiplier=of(self.multiplier),
            factors=of(self.factors),
            zero_factors=of(self.zero_factors),
        )

    def put_in_runs(self, *, in_tiles: bool = False) -> Coded:
        """The same weight in the same memory, its four-bit codes in the order in which tensor cores take them: of
        each `RUN` inputs, word t of four has those of the inputs 8 i + 2 t in its lower half, and those of the
        inputs 8 i + 2 t + 1 in its upper half, for i from 0 to 3. This object is of no use afterwards.

        `in_tiles`: of the four runs of each `TILE` inputs, first come the words with t = 0, then those with t = 1,
        and so on: what a thread multiplies lies in 16 bytes."""
        form, runs = self.form, TILE // RUN if in_tiles else 1
        assert form.table
        assert not form.in_runs
        assert form.inputs % (runs * RUN) == 0
        for codes in () if self.codes.is_meta else torch.split(self.codes, max(1, _VALUES_AT_ONCE // form.inputs)):
            one = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, runs, 4, 4, 2)  # run, i, t, half
            words = one.permute(0, 1, 4, 2, 5, 3).flatten(1)
            codes.copy_(words[:, 0::2] | words[:, 1::2] << 4)
        return replace(self, form=replace(form, in_runs=True, in_tiles=in_tiles))

    def split(self, sizes: Sequence[int]) -> list[Coded]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [self.rows(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def put(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        multiplier: Tensor | None,
        factors: Tensor | None = None,
        zero_factors: Tensor | None = None,
    ) -> None:
        """Fill this memory. Tensors with one number in place of several are spread."""
        self.codes.copy_(codes)
        _put(self.scales, scales)
        _put(self.zeros, zeros)
        _put(self.multiplier, multiplier)
        _put(self.factors, factors)
        _put(self.zero_factors, zero_factors)

    def put_into(self, other: Coded) -> None:
        """Fill memory of a `common_form`, or of the `plain_form`, with this weight."""
        form, groups = self.form, other.form.groups

        def finer(of_groups: Tensor) -> Tensor:
            return of_groups.repeat_interleave(-(-form.group // other.form.group), 1)[:, :groups]

        six = other.form.bits == 6
        same_codes = not six and form.table == other.form.table and form.codes == other.form.codes
        codes = self.codes if same_codes else self._wider_codes(torch.int8 if six else other.codes.dtype)
        as_steps = other.form.steps > 0
        scales, zeros = (self.scales, self.zeros) if as_steps else (self._scales(), self._zeros())
        if zeros is None:
            zeros = torch.zeros_like(scales[:1, :1]).expand(scales.shape)
        if form.offsets and not other.form.offsets:
            # A group without a scale is its offset, whatever its codes are: (0 - 1) * -offset.
            flat = scales == 0
            wide = flat.repeat_interleave(form.group, 1)[:, : form.inputs]
            codes = torch.where(wide[:, :: form.inputs // codes.shape[1]], 0, codes.view(torch.int8)).view(
                codes.dtype
            )
            of_flat = (zeros != 0).float()
            zeros, scales = (
                torch.where(flat, of_flat, -zeros / torch.where(flat, 1, scales)),
                torch.where(flat, -zeros, scales),
            )
        ones = torch.ones_like(scales[:, 0])
        zero_factors = self.zero_factors
        if other.zero_factors is None:
            zero_factors = None
        elif zero_factors is None:
            zero_factors = torch.zeros_like(other.zero_factors[:1, :1])
        other.put(
            sixes(codes) if six else codes,
            finer(scales),
            None if other.zeros is None else finer(zeros),
            None if other.multiplier is None else ones if self.multiplier is None else self.multiplier,
            self.factors if as_steps else None,
            zero_factors,
        )

    def _wider_codes(self, dtype: torch.dtype) -> Tensor:
        """Codes of eight bits, [outputs, inputs]."""
        table = self.form.table
        if self.form.bits == 6 and dtype == torch.int8:
            return of_sixes(self.codes)
        if table in (SIGNED, UNSIGNED) and dtype == torch.int8 and not self.form.in_runs:
            return (nibbles(self.codes)[:, : self.form.inputs] + int(table[0])).view(torch.int8)
        return self._numbers().to(dtype)

    def _scales(self) -> Tensor:
        """float32 [outputs, groups]."""
        return self._times(self.scales, self.factors)

    def _zeros(self) -> Tensor | None:
        return None if self.zeros is None else self._times(self.zeros, self.zero_factors)

    def _times(self, steps: Tensor, factors: Tensor | None) -> Tensor:
        if factors is None:
            return steps.float()
        return steps.float() * factors.float().repeat_interleave(self.form.steps, 1)[:, : self.form.groups]

    def _numbers(self) -> Tensor:
        """What the codes stand for, float32 [outputs, inputs]."""
        form = self.form
        if form.bits == 6:
            return of_sixes(self.codes).float()
        if not form.table:
            return self.codes.float()
        pairs = _pairs(form.table, self.codes.device)
        numbers = F.embedding(self.codes.int(), pairs).flatten(1)
        if form.in_runs:
            runs = TILE // RUN if form.in_tiles else 1
            numbers = numbers.view(len(numbers), -1, 4, runs, 2, 4).permute(0, 1, 3, 5, 2, 4).flatten(1)
        return numbers[:, : form.inputs]

    def values(self) -> Tensor:
        """The weight in float32 [outputs, inputs], exactly where float32 can hold the products."""
        value, zeros = self._numbers(), self._zeros()
        if zeros is not None and not self.form.offsets:
            value = value - self._spread(zeros)
        value = value * self._spread(self._scales())
        if zeros is not None and self.form.offsets:
            value = value + self._spread(zeros)
        return value if self.multiplier is None else value * self.multiplier[:, None]

    def _spread(self, of_groups: Tensor) -> Tensor:
        """[outputs, groups] -> float32 [outputs, inputs], or [outputs, 1] if there is one group."""
        wide = of_groups.float()
        return wide if wide.shape[1] == 1 else wide.repeat_interleave(self.form.group, 1)[:, : self.form.inputs]


def _put(into: Tensor | None, tensor: Tensor | None) -> None:
    assert (into is None) == (tensor is None), "the tensors of a weight are those of its form"
    if into is not None and tensor is not None:
        into.copy_(tensor.expand(into.shape))


def _pairs(table: tuple[float, ...], device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of each byte."""
    values = torch.tensor(table, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1)


def takes_int8(form: CodeLayout) -> bool:
    """Whether inputs in eight bits may meet these codes: integers of four bits."""
    return form.table in (SIGNED, UNSIGNED)


def rounded(x: Tensor, group: int) -> Tensor:
    """float32 [..., inputs] -> the nearest of 255 values between a run's largest input and its negative. A run has
    32 inputs, or 16 where groups are that short."""
    run = 16 if group % 32 == 16 else 32
    padded = F.pad(x, (0, -x.shape[-1] % run))
    runs = padded.view(*x.shape[:-1], -1, run)
    peaks = runs.abs().amax(-1, keepdim=True)
    found = (runs * (_MOST / peaks)).round() * (peaks / _MOST)
    return torch.where(peaks >= _LEAST_PEAK, found, 0).flatten(-2)[..., : x.shape[-1]]


@dataclass(frozen=True, slots=True)
class CodedLinear:
    """A linear layer whose weights are `Coded`. It widens the weights to float32 whenever it is called, some
    outputs at a time: exact and slow. int8_inputs: each row's inputs are rounded to integers and a step for a run
    of them (`rounded`), as kernels do that multiply integers; only beside `takes_int8`."""

    weight: Coded
    bias: Tensor | None = None
    int8_inputs: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        form, wide = self.weight.form, x.float()
        if self.int8_inputs:
            wide = rounded(wide, form.group)
        step = max(1, _VALUES_AT_ONCE // form.inputs)
        starts = range(0, form.outputs, step)
        parts = [wide @ self.weight.rows(i, min(i + step, form.outputs)).values().t() for i in starts]
        y = torch.cat(parts, -1)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


@dataclass(frozen=True, slots=True)
class CodedTable:
    """An embedding whose rows are `Coded`. dtype: of the rows that are looked up."""

    weight: Coded
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.codes.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.weight.form.outputs, self.weight.form.inputs))

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids: int64 [n] -> [n, inputs]."""
        return self.weight.chosen(ids).values().to(self.dtype)


Product = Callable[[Tensor, Coded, Tensor | None], Tensor]
"""x [T, in], a weight, a bias or None -> [T, out] of the type of x."""


@dataclass(frozen=True, slots=True)
class KernelLinear(CodedLinear):
    """One whose product a kernel computes from the codes."""

    product: Product | None = None

    def __call__(self, x: Tensor) -> Tensor:
        assert self.product is not None
        return self.product(x, self.weight, self.bias)


def takes_int8_inputs(part: object) -> bool:
    """Whether some linear layer in a part of a decoder, or in a sequence of parts, has `int8_inputs`."""
    if isinstance(part, CodedLinear):
        return part.int8_inputs
    if isinstance(part, tuple | list):
        return any(takes_int8_inputs(one) for one in part)
    return is_dataclass(part) and any(takes_int8_inputs(getattr(part, field.name)) for field in fields(part))
