"""The project's own Triton kernels against plain torch: on CUDA, or in Triton's interpreter on a CPU."""

# ruff: noqa: E402 - what Triton is to do is settled before it is imported

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from packaging.version import Version

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
known = Version(triton.__version__) >= Version("3.7") or Version(np.__version__) < Version("2.4")
if DEVICE == "cpu" and not known:
    pytest.skip("numpy 2.4 is not known to the interpreter of Triton before 3.7", allow_module_level=True)

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.parts.kernels import TorchKernels, rms_norm as plain_norm
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.states import Rounded
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import DeltaNet, Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cuda.fused import choose as fused
from petiole.gpu_worker.runtime.cuda.fused.accept import accept as fused_accept
from petiole.gpu_worker.runtime.cuda.fused.adapters import add_terms
from petiole.gpu_worker.runtime.cuda.fused.layers import gather_pages, rotate_and_store, token_slots, write_pages
from petiole.gpu_worker.runtime.cuda.fused.linear import decode
from petiole.gpu_worker.runtime.cuda.fused.norms import gated_rms_norm, rms_norm
from petiole.gpu_worker.runtime.cuda.fused.states.chunks import CHUNK, apply_delta_rule_in_chunks
from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import apply_delta_rule, convolve, prepare
from petiole.gpu_worker.runtime.step.noise import noise_keys
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata, choose
from petiole.gpu_worker.runtime.step.verify import accept
from tests.support import fake_flashinfer as plain
from tests.support.trials import rest

N, VOCAB = (64, 50_000) if DEVICE == "cuda" else (12, 9000)
"""Several of the chunks that a row is spread over."""


def some(values, short=1):
    """The interpreter is slow: of these, `make test` tries as many. A card tries all."""
    return rest(values, short if DEVICE == "cpu" else len(values))


SHAPES = some([((10, 3, 96),), ((4, 2, 64),), ((32, 8, 128),), ((9, 9, 64),)], short=2)


def fields(choice: SamplingMetadata) -> list[object]:
    return [getattr(choice, name) for name in SamplingMetadata.__dataclass_fields__]


def moved(choice: SamplingMetadata, rows: slice = slice(None)) -> SamplingMetadata:
    return SamplingMetadata(*(t[rows].to(DEVICE) if isinstance(t, torch.Tensor) else t for t in fields(choice)))


@pytest.mark.parametrize("sampling", some(["everything", "plain", "top_k", "top_p", "top_k and top_p"], short=2))
def test_it_draws_what_sorting_would_have_drawn(sampling):
    n, vocab = N, VOCAB
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0)) * 3
    keys = torch.from_numpy(noise_keys(np.arange(n, dtype=np.uint64), np.arange(n)))
    temperature = torch.linspace(0, 2, n)
    top_k = torch.arange(n) * 7 if sampling in ("top_k", "top_k and top_p", "everything") else None
    top_p = torch.linspace(0, 1, n) if sampling in ("top_p", "top_k and top_p", "everything") else None
    min_p = torch.full((n,), 0.02) if sampling == "everything" else None
    choice = SamplingMetadata(temperature, keys, top_k, top_p, min_p)
    drawn = fused.choose(logits.to(DEVICE), moved(choice)).cpu()
    # a tie to the last bit of a logarithm, or of a sum, may fall otherwise
    assert (choose(logits, choice) == drawn).float().mean() > 0.96
    for rows in (slice(0, 1), slice(5, 6), slice(0, n // 2)):  # alone, and beside others
        assert torch.equal(fused.choose(logits[rows].to(DEVICE), moved(choice, rows)).cpu(), drawn[rows])


@pytest.mark.parametrize(
    ("spread", "dtype"), some([(4.0, torch.bfloat16), (0.05, torch.float32), (1.0, torch.bfloat16)]), ids=str
)
def test_rows_of_every_kind_are_drawn_from_as_on_a_cpu(spread, dtype):
    """Almost flat ones, of which a top-p keeps almost all, and peaked ones; rounded ones, of which many are equal;
    with many banned tokens, or with all; each with filters of its own."""
    draw = torch.Generator().manual_seed(0)
    logits = (torch.randn(N, VOCAB, generator=draw) * spread).to(dtype)
    logits[1, torch.randperm(VOCAB, generator=draw)[: VOCAB // 2]] = float("-inf")
    logits[2] = float("-inf")
    logits[3] = 1.0
    keys = torch.from_numpy(noise_keys(np.arange(N, dtype=np.uint64), np.arange(N)))
    some = torch.arange(N)
    choice = SamplingMetadata(
        torch.where(some % 5 == 4, 0.0, 0.8),
        keys,
        torch.tensor([0, 1, 20, 5, VOCAB, 0])[some % 6],
        torch.tensor([0.95, 0.95, 1.0, 0.9999, 0.3, 0.0, 0.9])[some % 7],
        torch.tensor([0.0, 0.0, 0.1])[some % 3],
    )
    drawn = fused.choose(logits.to(DEVICE), moved(choice)).cpu()
    assert drawn[2] == 0, "some token, though all are banned"
    kept = some != 2
    assert (choose(logits.float(), choice) == drawn)[kept].float().mean() > 0.96
    for row in (0, 5, 7):
        rows = slice(row, row + 1)
        assert torch.equal(fused.choose(logits[rows].to(DEVICE), moved(choice, rows)).cpu(), drawn[rows])


def test_short_lists_of_tokens_change_no_token(monkeypatch):
    """Rows of which a few tokens matter, some hundreds, and more than a list has room for."""
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(5, VOCAB, generator=draw) * torch.tensor([0.05, 1.0, 3.0, 3.0, 6.0])[:, None]
    keys = torch.from_numpy(noise_keys(np.arange(5, dtype=np.uint64), np.arange(5)))
    top_k, top_p = torch.tensor([0, 300, 0, 20, 0]), torch.tensor([0.99, 0.9, 0.95, 0.95, 1.0])
    choice = SamplingMetadata(torch.full((5,), 0.7), keys, top_k, top_p, torch.tensor([0.0, 0, 0, 0, 0.2]))
    drawn = []
    for way in ("off", "rows"):
        monkeypatch.setenv("PETIOLE_UNTIMED", way)
        drawn.append(fused.choose(logits.to(DEVICE), moved(choice)).cpu())
    assert torch.equal(*drawn)
    assert torch.equal(drawn[0], choose(logits, choice))


def test_likely_tokens_whose_groups_are_one_leave_enough_for_a_nucleus():
    """Their groups' largest logits are few, so that the first cut is too high."""
    logits = torch.full((2, VOCAB), -9.0)
    logits[:, 7 : 32 * 128 : 128] = torch.linspace(3, 0, 32)
    keys = torch.from_numpy(noise_keys(np.arange(2, dtype=np.uint64), np.arange(2)))
    choice = SamplingMetadata(torch.ones(2), keys, None, torch.tensor([0.9, 0.99]), None)
    assert torch.equal(fused.choose(logits.to(DEVICE), moved(choice)).cpu(), choose(logits, choice))


@pytest.mark.parametrize("n", some([1, 40]))
def test_logits_that_are_no_numbers_are_not_drawn(n):
    logits = torch.zeros(n, 600)
    logits[:, ::2] = float("nan")
    keys = torch.from_numpy(noise_keys(np.arange(n, dtype=np.uint64), np.arange(n)))
    for top_k in (None, torch.full((n,), 3)):
        choice = SamplingMetadata(torch.ones(n), keys, top_k, None, None)
        assert (fused.choose(logits.to(DEVICE), moved(choice)) % 2 == 1).all()


@pytest.mark.parametrize("n", some([80], short=0))
def test_equal_logits_stay_or_go_together(n):
    logits = torch.zeros(n, 1000, device=DEVICE)
    logits[:, 10:20] = 4.0  # ten share the second place
    logits[:, 3] = 9.0
    keys = torch.from_numpy(noise_keys(np.arange(n, dtype=np.uint64), np.arange(n))).to(DEVICE)
    one = torch.ones(n, device=DEVICE)
    choice = SamplingMetadata(9 * one, keys, 2 * one.long(), None, None)
    assert set(fused.choose(logits, choice).tolist()) == {3, *range(10, 20)}


def parts(qkv: torch.Tensor, n_heads: int, n_kv_heads: int, width: int) -> list[torch.Tensor]:
    """Queries, keys and values where a product leaves them."""
    split = qkv.split([n_heads * width, n_kv_heads * width, n_kv_heads * width], -1)
    return [part.view(len(qkv), -1, width) for part in split]


@pytest.mark.parametrize("width", [0, 3])
def test_drafts_are_accepted_as_on_a_cpu(width):
    """Rows without outputs, with one, and with more than a warp has lanes; the token that is refused at any place,
    or nowhere."""
    draw, counts = np.random.default_rng(0), np.array([3, 0, 1, 6, 70, 33, 32, 6, 1, 0])
    n, total = len(counts), counts.sum()
    first, rows = counts.cumsum() - counts, draw.permutation(np.arange(1, 21))[:n]
    for refused_at in (0, 2, 31, 32, 69):
        tokens = draw.integers(0, 50_000, total)
        following = tokens.copy()
        within = np.arange(total) - np.repeat(first, counts)
        following[within == refused_at] += 1
        following[(first + counts)[counts > 0] - 1] = -1
        drafts = torch.from_numpy(np.concatenate([first, counts, rows, following]))
        values = torch.from_numpy(draw.integers(0, 99, (total, width), dtype=np.int32)) if width else None
        results = []
        for device, function in (("cpu", accept), (DEVICE, fused_accept)):
            lines = torch.full((21, width), -7, dtype=torch.int32, device=device)
            pending = PendingInputs(torch.full((21,), -7, device=device), lines)
            given = (torch.from_numpy(tokens), values, drafts)
            given = (t if t is None else t.to(device) for t in given)
            results.append([t.cpu() for t in (*function(*given, n, pending), pending.token_ids, pending.values)])
        assert all(map(torch.equal, *results))
        assert results[0][1].tolist() == np.minimum(counts, refused_at + 1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.25], ids=["whole", "half", "quarter"])
@pytest.mark.parametrize("near", [False, True], ids=["halves", "neighbours"])
def test_heads_are_normed_and_rotated_as_in_torch_and_keys_and_values_stored(shape, near, part, normed, dtype):
    n_heads, n_kv_heads, width = shape
    qkv = torch.randn(7, (n_heads + 2 * n_kv_heads) * width, device=DEVICE, dtype=torch.bfloat16)
    qkv[:, -n_kv_heads * width :] *= 300  # more than eight bits hold
    norms = tuple(torch.rand(width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)) if normed else None
    positions = torch.tensor([3, 0, 49, 7, 8, 8, 1], dtype=torch.int32, device=DEVICE)
    rotation = Rotation(norms, 1e-6, positions, torch.randn(50, int(part * width), device=DEVICE), near)
    slots = torch.tensor([3, 19, 0, 7, 8, 12, 1], device=DEVICE)
    found = []
    for by in (rotate_and_store, plain.rotate_and_store):
        q, k, v = parts(qkv.clone(), *shape)
        keys, values = (torch.zeros(20, n_kv_heads, width, device=DEVICE).to(dtype) for _ in range(2))
        by(q, k, v, rotation, keys, values, slots)
        assert torch.equal(v, parts(qkv, *shape)[2])
        found.append([q.float(), keys.float(), values.float()])
    (q, keys, values), (q_expected, keys_expected, values_expected) = found
    close = 1e-2 if dtype is torch.bfloat16 else 0.13  # a last bit may fall otherwise
    torch.testing.assert_close(q, q_expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(keys, keys_expected, rtol=close, atol=1e-2)
    assert torch.equal(values, values_expected)


def test_keys_are_rounded_to_eight_bits_as_by_torch():
    """Numbers of all sizes, halves between two codes, the least ones, and those beyond the range."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[~codes.isnan()].sort().values
    near = torch.cat(
        [codes, (codes[1:] + codes[:-1]) / 2, torch.randn(20_000) * 10 ** torch.empty(20_000).uniform_(-4, 3)]
    )
    near = torch.cat(
        [near, near * (1 + 1e-6), near * (1 - 1e-6), torch.tensor([449.0, -1e30, 2.0**-10, -(2.0**-11)])]
    )
    n = len(near) // 64
    k = near[: n * 64].to(DEVICE).view(n, 1, 64)
    rotation = Rotation(None, 0.0, torch.zeros(n, dtype=torch.int32, device=DEVICE), None, False)
    keys, values = (torch.full((n, 1, 64), 1.0, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
    rotate_and_store(k.clone(), k, k, rotation, keys, values, torch.arange(n, device=DEVICE))
    expected = k.clamp(-448, 448).to(torch.float8_e4m3fn)
    for found in (keys, values):
        assert torch.equal(found.view(torch.uint8).cpu(), expected.view(torch.uint8).cpu())


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_and_slots_follow_the_page_table(page_size):
    tables = torch.randint(0, 900, (2, 6, 3000), dtype=torch.int32)
    given = [torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 5], [0, 2990, 77], [0, 3, 4, 2900])]
    ours = torch.full((3000,), -1, dtype=torch.int32)
    expected = ours.clone()
    plain.gather_pages(tables[1], *given, expected)
    ours = ours.to(DEVICE)
    gather_pages(tables[1].to(DEVICE), *(x.to(DEVICE) for x in given), ours)
    assert torch.equal(ours.cpu(), expected)
    rows, positions = (torch.randint(0, most, (777,), dtype=torch.int32) for most in (6, 3000))
    slots = token_slots(tables.to(DEVICE), rows.to(DEVICE), positions.to(DEVICE), page_size)
    assert torch.equal(slots.cpu(), plain.token_slots(tables, rows, positions, page_size))


@pytest.mark.parametrize("n", [1, 40, 700])
def test_new_pages_are_written_to_the_page_table(n):
    """Beside padding, which writes to the first entry what is there. The pages of groups may lie apart."""
    tables = torch.randint(0, 900, (2, 60, 300), dtype=torch.int32)
    tables[:, 0, 0] = 0
    entries = torch.randperm(tables[0].numel() - 1)[:n].int() + 1
    rows, columns, *pages = (
        torch.cat([x, torch.zeros(5)]).int() for x in (entries // 300, entries % 300, entries, 2 * entries)
    )
    ours, apart = tables.to(DEVICE), torch.nn.functional.pad(torch.stack(pages), (0, 3))[:, :-3]
    write_pages(ours, *(x.to(DEVICE) for x in (rows, columns)), apart.to(DEVICE))
    plain.write_pages(tables, rows, columns, apart)
    assert torch.equal(ours.cpu(), tables)


def test_a_slot_that_32_bits_cannot_index():
    """Memory that is not touched is not taken on a CPU."""
    n, qkv = 2**31 // 128 + 8, torch.randn(2, 3 * 128, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.empty(n, 1, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([n - 1, 5], device=DEVICE)
    nowhere = torch.cat([torch.ones(1, 64), torch.zeros(1, 64)], 1).to(DEVICE)  # as they are
    rotation = Rotation(None, 1e-6, torch.zeros(2, dtype=torch.int32, device=DEVICE), nowhere)
    q, k, v = parts(qkv, 1, 1, 128)
    rotate_and_store(q, k, v, rotation, keys, values, slots)
    for target, source in ((keys, k), (values, v)):
        assert torch.equal(torch.stack([target[i] for i in slots.tolist()]), source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("width", "outputs", "most"), [(64, (96, 32, 32), 8), (1000, (130,), 12), (600, (70, 70), 1)]
)
def test_each_row_adds_what_its_own_adapter_gives(width, outputs, most, dtype):
    ranks = torch.tensor([0, most, max(1, most // 2), 1], dtype=torch.int32)
    slots = torch.tensor([1, 0, 3, 2, 1, 0], dtype=torch.int32)
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(dtype)

    x, y = normal(len(slots), width), normal(len(slots), sum(outputs))
    a = normal(len(ranks), len(outputs) * most, width)
    b = [normal(len(ranks), n, most) for n in outputs]  # beyond a slot's rank too, where it does not count
    expected, ours = y.clone(), y.clone().to(DEVICE)
    plain.add_terms(x, expected, a, b, slots, ranks)
    device = [t.to(DEVICE) for t in (x, a, slots, ranks)]
    add_terms(device[0], ours, device[1], [m.to(DEVICE) for m in b], *device[2:])
    near = 2e-2 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours.cpu(), expected, rtol=near, atol=near)
    assert torch.equal(ours.cpu()[slots == 0], y[slots == 0])


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (32, 128), (64, 160)], ids=str)
def test_adapters_of_other_sizes_than_the_layer_are_refused(inputs, outputs):
    x, y = torch.zeros(2, inputs, device=DEVICE), torch.zeros(2, outputs, device=DEVICE)
    a, b = torch.ones(2, 8, 64, device=DEVICE), [torch.ones(2, 64, 4, device=DEVICE)] * 2
    ones = torch.ones(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ModelError, match="of the linear layer, got 64 and 128"):
        add_terms(x, y, a, b, ones, 4 * ones)
    assert not y.any()


@pytest.mark.parametrize("biased", some([True, False]))
@pytest.mark.parametrize(("n", "outputs", "inputs"), [(1, 96, 256), (5, 128, 512), (16, 80, 768)], ids=str)
def test_a_product_with_what_precedes_and_follows_it(n, outputs, inputs, biased):
    """The interpreter multiplies no bfloat16."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    near = {"rtol": 2e-2, "atol": 2e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-4}
    draw = torch.Generator().manual_seed(n)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=draw) * scale).to(DEVICE, dtype)

    x, norm = normal(n, inputs), normal(inputs) + 1
    linear = DenseLinear(normal(outputs, inputs, scale=inputs**-0.5), normal(outputs) if biased else None)
    wide = DenseLinear(linear.weight.float(), linear.bias.float() if biased else None)
    normed = plain.rmsnorm(x.float(), norm.float(), 1e-5)
    torch.testing.assert_close(decode.product(x, linear).float(), wide(x.float()), **near)
    residual = decode.begin(x, (norm, 1e-5))
    torch.testing.assert_close(decode.product(residual, linear).float(), wide(normed), **near)
    gate, up = wide(normed).chunk(2, -1)
    gated = decode.product(residual, linear, gated=True).float()
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, **near)
    alone = [decode.product(decode.begin(x[i : i + 1], (norm, 1e-5)), linear) for i in range(n)]
    assert torch.equal(torch.cat(alone), decode.product(residual, linear))


@pytest.mark.parametrize(("n", "hidden", "inner"), [(1, 256, 512), (5, 512, 256), (16, 768, 768)], ids=str)
def test_a_product_that_is_added_knows_the_next_norm(n, hidden, inner):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    near = {"rtol": 2e-2, "atol": 2e-2} if DEVICE == "cuda" else {"rtol": 1e-4, "atol": 1e-4}
    draw = torch.Generator().manual_seed(n)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=draw) * scale).to(DEVICE, dtype)

    value, x, norm = normal(n, hidden), normal(n, inner), normal(hidden) + 1
    linear, after = (DenseLinear(normal(hidden, width, scale=width**-0.5)) for width in (inner, hidden))
    expected = value.float() + x.float() @ linear.weight.float().T
    sums = decode.added(x, linear, decode.begin(value, (norm, 1e-5)), (norm, 1e-5))
    assert sums.value is value
    torch.testing.assert_close(value.float(), expected, **near)
    normed = plain.rmsnorm(expected, norm.float(), 1e-5) @ after.weight.float().T
    torch.testing.assert_close(decode.product(sums, after).float(), normed, **near)
    afresh = decode.product(decode.begin(value, (norm, 1e-5)), after)
    torch.testing.assert_close(decode.product(sums, after), afresh, **near)


@pytest.mark.parametrize("width", [64, 1000])
def test_a_norm_whose_weight_is_in_float32(width):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x, weight = normal(5, 2 * width, dtype=dtype)[:, width:], normal(width)
    added, before = normal(5, width, dtype=dtype), x.clone()
    near = {"rtol": 2**-7, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), plain_norm(x, weight, 1e-5), **near)
    found = rms_norm(x, weight, 1e-5, added=added)
    assert torch.equal(x, before + added)
    torch.testing.assert_close(found, plain_norm(before + added, weight, 1e-5), **near)


BOUNDS, PLACES = [0, 1, 8, 8, 13], [2, 5, 0, 1]
"""Four rows, one of them of padding, whose positions are followed by two of padding."""
COPIES = [-1, -1, 6, -1, -1, -1, -1, 7, 8, -1, -1, -1, -1, -1, -1]


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def rows_of_a_step():
    of = [0, *[1] * 7, *[3] * 5, 0, 0]
    return int32(*PLACES), int32(*BOUNDS), int32(*of), int32(*COPIES)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("channels", "width", "biased"), some([(300, 4, False), (70, 3, True), (40, 1, False)], short=3)
)
def test_a_convolution_over_what_is_stored(channels, width, biased, dtype):
    places, bounds, of, copies = rows_of_a_step()
    x, kernel = normal(15, 2 * channels, dtype=dtype)[:, channels:], normal(channels, width, dtype=dtype)
    bias = normal(channels, dtype=dtype) if biased else None
    stored = normal(9, width - 1, channels, dtype=dtype)
    wanted = stored.clone()
    expected = plain.convolve(x, kernel, bias, wanted, places, bounds, of, copies)
    mixed = convolve(x, kernel, bias, stored, places, bounds, of, copies)
    assert torch.equal(stored, wanted)
    torch.testing.assert_close(mixed[:13], expected[:13], rtol=1e-5, atol=1e-5)


def net_of_a_step(key_heads, heads, key_dim, value_dim, grouped, dtype, n=15, places=9):
    """A delta net; what its projections give for n positions, in columns of wider tensors; its stored inputs."""
    net = DeltaNet(key_heads, heads, key_dim, value_dim, 4, Norm(), grouped=grouped)
    fading, bias = -normal(heads).exp(), normal(heads + 1)[1:]
    kernel, nothing = normal(net.channels, net.kernel, dtype=dtype), DenseLinear(torch.empty(0, 0))
    weights = DeltaNetWeights(nothing, nothing, kernel, fading, bias, NormWeights(), nothing)
    projected, gates = (
        normal(n, sum(sizes) + 3, dtype=dtype)[:, 3:] for sizes in (net.input_sizes, net.gate_sizes)
    )
    return net, weights, projected, 6 * gates, normal(places, net.kernel - 1, net.channels, dtype=dtype)


NETS = [((1, 3, 16, 24),), ((2, 2, 24, 32),), ((2, 4, 8, 5),), ((16, 32, 128, 128),)]
"""Heads of keys and of values, and the dimensions of both."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["apart", "grouped"])
@pytest.mark.parametrize("sizes", some(NETS, short=3), ids=str)
def test_what_the_delta_rule_reads_is_made_of_what_the_projections_give(sizes, grouped, dtype):
    places, bounds, of, copies = rows_of_a_step()
    net, weights, projected, gates, stored = net_of_a_step(*sizes, grouped, dtype)
    wanted = stored.clone()
    expected = plain.prepare(net, weights, projected, gates, wanted, places, bounds, of, copies)
    found = prepare(net, weights, projected, gates, stored, places, bounds, of, copies)
    assert torch.equal(stored, wanted)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one[:13], other[:13], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True], ids=["apart", "grouped"])
def test_a_row_that_is_cut_anywhere_reads_the_same_bits(grouped):
    """And leaves the same inputs, whatever its parts and whoever is beside it."""
    n = 6
    net, weights, projected, gates, before = net_of_a_step(1, 2, 16, 8, grouped, torch.bfloat16, n, places=3)

    def run(stored, place, *bounds):
        parts = []
        for first, end in itertools.pairwise(bounds):
            many = end - first  # beside a row of the first position, which comes first
            at = [0, *range(first, end), 0]
            of, copies = int32(0, *[1] * many, 0), int32(*[-1] * (many + 2))
            step = int32(1 - place, place), int32(0, 1, 1 + many), of, copies
            given = (part[at] for part in (projected, gates))
            parts.append([part[1:-1] for part in prepare(net, weights, *given, stored, *step)])
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    whole = before.clone()
    expected = run(whole, 1, 0, n)
    for cut in range(1, n):
        stored = before.clone()
        assert all(map(torch.equal, run(stored, 1, 0, cut, n), expected))
        assert torch.equal(stored[1], whole[1])
    stored = before.clone()
    assert all(map(torch.equal, run(stored, 1, *range(n + 1)), expected))
    assert torch.equal(stored[1:], whole[1:])


def test_gates_far_from_zero():
    places, bounds, of, copies = rows_of_a_step()
    net, weights, projected, _, stored = net_of_a_step(1, 2, 8, 8, False, torch.float32)
    spread = torch.linspace(-80, 80, 60, device=DEVICE).view(15, 4)
    g, beta = prepare(net, weights, projected, spread, stored, places, bounds, of, copies)[1:]
    a, b = spread[:, 2:].double() + weights.bias, spread[:, :2].double()
    torch.testing.assert_close(g.double(), weights.fading * torch.nn.functional.softplus(a), rtol=3e-5, atol=0)
    torch.testing.assert_close(beta.double(), b.sigmoid(), rtol=3e-5, atol=0)


@pytest.mark.parametrize("in_float32", [False, True], ids=["weight of the model's type", "weight in float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("groups", "heads", "width"), [(2, 2, 128), (2, 4, 24), (1, 3, 40)])
def test_heads_are_normed_and_gated_as_in_torch(groups, heads, width, dtype, in_float32):
    if dtype is torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding it")
    x, every = normal(5, heads, width), heads // groups * width
    z = normal(5, groups * (every + 7) + 9, dtype=dtype)[:, 9:].unflatten(1, (groups, -1))[..., 7:]
    weight = normal(width, dtype=torch.float32 if in_float32 else dtype)
    expected = TorchKernels().gated_rms_norm(x, z, weight, 1e-5)
    found = gated_rms_norm(x, z, weight, 1e-5)
    assert found.dtype == dtype
    near = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}  # a rounding may fall otherwise
    torch.testing.assert_close(found, expected, rtol=near[dtype], atol=1e-6)


def packed(q, k, v):
    """Heads as the delta rule reads them."""
    return torch.cat([part.flatten(1) for part in (q, k, v)], 1)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    ("key_heads", "heads", "key_dim", "value_dim"),
    some([(1, 3, 16, 64), (2, 2, 24, 32), (4, 8, 128, 128)], short=2),
)
def test_the_delta_rule_over_what_is_stored(key_heads, heads, key_dim, value_dim, rounded):
    places, bounds, _, copies = rows_of_a_step()
    q, k = (torch.nn.functional.normalize(normal(15, key_heads, key_dim + i)[..., i:], dim=-1) for i in range(2))
    v, g, beta = normal(15, heads, value_dim), -normal(15, heads).abs(), normal(15, heads).sigmoid()
    stored, kept, kept_here = normal(6 if rounded else 9, heads, key_dim, value_dim), None, None
    if rounded:
        kept, kept_here = (
            Rounded(
                torch.zeros(3, heads * key_dim * value_dim, dtype=torch.int8, device=DEVICE),
                torch.zeros(3, heads * key_dim * value_dim // 32, device=DEVICE),
            )
            for _ in range(2)
        )
    wanted = stored.clone()
    given = packed(q, k, v), g, beta
    expected = plain.apply_delta_rule(*given, wanted, kept, places, bounds, copies)
    outputs = apply_delta_rule(*given, stored, kept_here, places, bounds, copies)
    torch.testing.assert_close(outputs[:13], expected[:13], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored, wanted, rtol=1e-5, atol=1e-5)
    if kept is not None and kept_here is not None:
        every = torch.arange(3, device=DEVICE)
        step = float(kept.scales.max())
        torch.testing.assert_close(kept_here.read(every), kept.read(every), rtol=0, atol=1.01 * step)


def recurrence(q, k, v, g, beta, stored):
    """One row in float64, position by position: outputs, and S after each position."""
    each = v.shape[1] // k.shape[1]
    q, k, v, g, beta, stored = (part.double().cpu() for part in (q, k, v, g, beta, stored))
    q, k = (part.repeat_interleave(each, dim=1) for part in (q, k))
    outputs, after = torch.empty_like(v), []
    for t in range(len(v)):
        faded = stored * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], faded))
        stored = faded + k[t][:, :, None] * change[:, None, :]
        outputs[t] = torch.einsum("hk,hkv->hv", q[t], stored)
        after.append(stored)
    return outputs, after


NEAR = {"rtol": 2e-5, "atol": 2e-5} if DEVICE == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
"""A card multiplies some numbers in tf32, the interpreter none."""

FADING = {"slowly": 0.05, "at once": 8.0}
"""What is stored of a chunk's first position is still there after its last one, or gone after a few."""


@pytest.mark.parametrize("alike", [False, True], ids=["keys differ", "keys are alike"])
@pytest.mark.parametrize("fading", FADING)
@pytest.mark.parametrize(
    "lengths", [(1, 4 * CHUNK + 5, 0, CHUNK - 1, CHUNK), (6 * CHUNK,), (CHUNK + 1, 1, 1)], ids=str
)
def test_the_delta_rule_in_chunks_is_the_recurrence(lengths, fading, alike):
    check_chunks(lengths, (2, 4, 24, 32), FADING[fading], alike, copied=(0, 20, 31, 32, 100))


def test_more_rows_than_a_block_of_chunks_looks_at_together():
    check_chunks(
        [*[0] * 100, CHUNK + 3, *[0] * 40, 1, CHUNK + 1, 2 * CHUNK], (1, 1, 16, 16), 0.3, False, copied=(33,)
    )


def test_the_delta_rule_in_chunks_at_the_sizes_of_a_model():
    check_chunks((CHUNK + 7, 1), (1, 2, 128, 128), 0.3, alike=False, copied=(35,))


def check_chunks(lengths, sizes, fading, alike, copied):
    """Outputs, states and snapshots against float64. alike: neighbours have nearly the same keys, so the system of
    a chunk is as far from the identity as it gets. copied: positions after which rows are copied."""
    key_heads, heads, key_dim, value_dim = sizes
    n, rows = sum(lengths) + 2, len(lengths)  # two of padding
    bounds = np.cumsum([0, *lengths])
    q, k = (torch.nn.functional.normalize(normal(n, key_heads, key_dim + i)[..., i:], dim=-1) for i in range(2))
    if alike:
        k = torch.nn.functional.normalize(k[:1] + 0.05 * k, dim=-1)
    v, g = normal(n, heads, value_dim), -fading * normal(n, heads).abs()
    beta = (normal(n, heads) + (4 if alike else 0)).sigmoid()
    marked = [int(first) + t for first, many in zip(bounds, lengths, strict=False) for t in copied if t < many]
    copies = torch.full((n,), -1, dtype=torch.int32)
    copies[marked] = torch.arange(rows, rows + len(marked), dtype=torch.int32)
    stored = normal(rows + len(marked), heads, key_dim, value_dim)
    before = stored.clone()
    places = list(reversed(range(rows)))
    step = int32(*places), int32(*bounds), copies.to(DEVICE)
    outputs = apply_delta_rule_in_chunks(packed(q, k, v), g, beta, stored, None, *step)
    near = {"rtol": 1e-4, "atol": 2e-4} if alike and DEVICE == "cpu" else NEAR
    for place, first, many in zip(places, bounds, lengths, strict=False):
        cut = slice(first, first + many)
        found, after = recurrence(q[cut], k[cut], v[cut], g[cut], beta[cut], before[place])
        torch.testing.assert_close(outputs[cut].double().cpu(), found, **near)
        last = after[-1] if after else before[place].double().cpu()
        torch.testing.assert_close(stored[place].double().cpu(), last, **near)
        for t in copied:
            if t < many:
                torch.testing.assert_close(stored[copies[first + t]].double().cpu(), after[t], **near)


@pytest.mark.parametrize("cut", [1, CHUNK, CHUNK + 9, 2 * CHUNK])
def test_a_row_in_chunks_that_is_cut_goes_on_from_its_state(cut):
    n, heads, size = 2 * CHUNK + 20, 2, 32
    q, k = (torch.nn.functional.normalize(normal(n, heads, size + i)[..., i:], dim=-1) for i in range(2))
    v, g, beta = normal(n, heads, size), -normal(n, heads).abs() / 8, normal(n, heads).sigmoid()
    whole, parts = (normal(1, heads, size, size) for _ in range(2))
    none = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)

    def run(stored, first, end):
        some = (part[first:end] for part in (packed(q, k, v), g, beta))
        step = int32(0), int32(0, end - first), none[first:end]
        return apply_delta_rule_in_chunks(*some, stored, None, *step)

    expected = run(whole, 0, n)
    torch.testing.assert_close(torch.cat([run(parts, 0, cut), run(parts, cut, n)]), expected, **NEAR)
    torch.testing.assert_close(parts, whole, **NEAR)


def test_rows_that_decode_beside_a_prompt_in_chunks_have_the_bits_of_the_recurrence():
    n, heads, size = CHUNK + 2, 2, 32
    q, k = (torch.nn.functional.normalize(normal(n, heads, size + i)[..., i:], dim=-1) for i in range(2))
    v, g, beta = normal(n, heads, size), -normal(n, heads).abs(), normal(n, heads).sigmoid()
    stored = normal(3, heads, size, size)
    alone, beside = stored.clone(), stored.clone()
    step = int32(0, 1, 2), int32(0, 1, n - 1, n), torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    expected = apply_delta_rule(packed(q, k, v), g, beta, alone, None, *step)
    outputs = apply_delta_rule_in_chunks(packed(q, k, v), g, beta, beside, None, *step)
    assert torch.equal(outputs[[0, -1]], expected[[0, -1]])
    assert torch.equal(beside[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("rule", [apply_delta_rule, apply_delta_rule_in_chunks])
def test_heads_in_turns_are_those_in_rows_in_another_order(rule):
    n, key_heads, each, size = CHUNK + 3, 2, 3, 32
    turned = torch.arange(key_heads * each, device=DEVICE).view(key_heads, each).t().flatten()
    q, k = (torch.nn.functional.normalize(normal(n, key_heads, size + i)[..., i:], dim=-1) for i in range(2))
    v, g = normal(n, key_heads * each, size), -normal(n, key_heads * each).abs()
    beta, stored = normal(n, key_heads * each).sigmoid(), normal(1, key_heads * each, size, size)
    in_turns = stored[:, turned].contiguous()
    step = int32(0), int32(0, n), torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    expected = rule(packed(q, k, v), g, beta, stored, None, *step)
    v, g, beta = (part[:, turned].contiguous() for part in (v, g, beta))
    outputs = rule(packed(q, k, v), g, beta, in_turns, None, *step, tiled=True)
    assert torch.equal(outputs, expected[:, turned])
    assert torch.equal(in_turns, stored[:, turned])


def test_states_of_other_sizes_than_the_step_are_refused():
    places, bounds, of, copies = rows_of_a_step()
    with pytest.raises(ValueError, match="must fit"):
        convolve(normal(15, 8), normal(8, 4), None, normal(9, 3, 9), places, bounds, of, copies)
    q, v, gates = normal(15, 2, 8), normal(15, 4, 32), normal(15, 4)
    with pytest.raises(ValueError, match="must fit"):
        apply_delta_rule(packed(q, q, v), gates, gates, normal(9, 4, 8, 16), None, places, bounds, copies)
    net, weights, projected, gates, stored = net_of_a_step(2, 4, 8, 32, grouped=False, dtype=torch.float32)
    with pytest.raises(ValueError, match="must fit"):
        prepare(net, weights, projected[:, 1:], gates, stored, places, bounds, of, copies)
    with pytest.raises(ValueError, match="must fit"):
        prepare(net, weights, projected, gates[:, 1:], stored, places, bounds, of, copies)
    with pytest.raises(ValueError, match="must fit"):
        gated_rms_norm(normal(3, 4, 32), normal(3, 2, 96), normal(32), 1e-6)
