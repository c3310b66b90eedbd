"""The delta rule of long rows by fla-core. Without the package or a card, a function stands in for its own: as
strict about its arguments, in float32."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from petiole.gpu_worker.models.parts.recurrent.states import Rounded
from petiole.gpu_worker.runtime.cuda.fused.states import fla
from petiole.gpu_worker.runtime.cuda.fused.states.fla import CHUNK, apply_delta_rule_by_fla, parts_of
from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import apply_delta_rule
from tests.gpu.test_fused import DEVICE, int32, normal, packed
from tests.support.fake_flashinfer import install_fla

REAL = DEVICE != "cpu" and importlib.util.find_spec("fla") is not None


@pytest.fixture(autouse=True)
def computes(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        install_fla(monkeypatch)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("lengths", "copied"),
    [((1, 2 * CHUNK + 9, 0, CHUNK - 1, CHUNK), (70, CHUNK + 71)), ((CHUNK + 1,), (CHUNK - 1, CHUNK))],
    ids=str,
)
def test_rows_parts_and_copies_are_those_of_the_recurrence(
    lengths: tuple[int, ...], copied: tuple[int, ...], tiled: bool, rounded: bool
) -> None:
    key_heads, heads, size, n, rows = 2, 4, 32, sum(lengths) + 2, len(lengths)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    q, k = (torch.nn.functional.normalize(normal(n, key_heads, size + i)[..., i:], dim=-1) for i in range(2))
    v, g, beta = normal(n, heads, size), -normal(n, heads).abs() / 4, normal(n, heads).sigmoid()
    marked = [int(first) + t for first, many in zip(bounds, lengths, strict=False) for t in copied if t < many]
    copies = np.full(n, -1, np.int32)
    copies[marked] = np.arange(rows, rows + len(marked))
    matrices = normal(rows + (0 if rounded else len(marked)), heads, size, size)
    codes, scales = (torch.zeros(len(marked), n, device=DEVICE) for n in (heads * size**2, heads * size**2 // 32))
    stored = [(matrices.clone(), Rounded(codes.char(), scales.clone()) if rounded else None) for _ in range(2)]
    step = int32(*reversed(range(rows))), int32(*bounds), torch.from_numpy(copies).to(DEVICE)
    given = packed(q, k, v), g, beta
    parts = parts_of(bounds, copies, torch.device(DEVICE))
    expected = apply_delta_rule(*given, *stored[0], *step, tiled=tiled)
    outputs = apply_delta_rule_by_fla(*given, *stored[1], *step, parts, tiled=tiled)
    torch.testing.assert_close(outputs[: n - 2], expected[: n - 2], rtol=3e-2, atol=1e-2)
    torch.testing.assert_close(stored[1][0], stored[0][0], rtol=3e-2, atol=1e-2)
    short = [
        t for first, many in zip(bounds, lengths, strict=False) if many < CHUNK for t in range(first, first + many)
    ]
    assert torch.equal(outputs[short], expected[short]), "short rows have the bits of the recurrence"
    if rounded:
        every = torch.arange(len(marked), device=DEVICE)
        found, wanted = (kept.read(every) for _, kept in stored if kept is not None)
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=5e-2)


def test_a_row_is_cut_behind_each_copy_and_short_rows_have_no_parts() -> None:
    copies = np.full(300, -1, np.int32)
    copies[[3, 80, 209]] = 5
    parts = parts_of(np.array([0, 10, 210, 273], np.int32), copies, torch.device("cpu"))
    assert [(part.row, part.first, part.end, part.copied) for part in parts] == [
        (1, 10, 81, True),
        (1, 81, 210, True),
    ]
    assert [part.bounds.tolist() for part in parts] == [[0, 71], [0, 129]]


@pytest.mark.parametrize(
    ("exact", "untimed", "here"),
    [("off", "chunks", True), ("on", "on", True), ("off", "off", True), ("off", "on", False)],
)
def test_it_is_chosen_where_it_is_asked_for_and_installed(
    exact: str, untimed: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_EXACT", exact)
    monkeypatch.setenv("PETIOLE_UNTIMED", untimed)
    monkeypatch.setattr(fla.importlib.util, "find_spec", lambda name: object() if here else None)
    assert fla.chosen() == ((exact, untimed, here) == ("off", "chunks", True))
