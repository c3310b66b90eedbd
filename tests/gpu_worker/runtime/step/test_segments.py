"""The segments of a step say of every query which keys it sees, wherever regions lie and chunks begin and end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import given, strategies as st

from petiole.gpu_worker.runtime.interface import FEATURES, NO_UPDATES, PENDING, VALUES, StepBatch
from petiole.gpu_worker.runtime.step.inputs import StepInputs, lay_out
from petiole.gpu_worker.runtime.step.segments import Run, segmented

WIDTH = 2


@dataclass
class Chunk:
    """Of one row: its positions from start on, its regions, and whether its last position is sampled."""

    start: int
    length: int
    regions: list[tuple[int, int]]
    sampled: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@st.composite
def chunks(draw: Any) -> Chunk:
    """Text, regions and text again; the chunk begins anywhere, and ends inside no region."""
    bounds, at = list[tuple[int, int]](), 0
    for _ in range(draw(st.integers(0, 3))):
        begin = at + draw(st.integers(0, 3))
        at = begin + draw(st.integers(1, 5))
        bounds.append((begin, at))
    last = at + draw(st.integers(1, 3))
    ends = [end for end in range(1, last + 1) if not any(b < end < e for b, e in bounds)]
    end = draw(st.sampled_from(ends))
    start = draw(st.integers(0, end - 1))
    return Chunk(start, end - start, [(b, e) for b, e in bounds if start < e and b < end], draw(st.booleans()))


def batch_of(parts: list[Chunk]) -> StepBatch:
    """Row k + 1 is the k-th. Tokens are PENDING, or tell row and position."""
    rows = np.arange(1, len(parts) + 1, dtype=np.int32)
    ids = [100 * row + position for row, p in zip(rows, parts, strict=True) for position in range(p.start, p.end)]
    tokens, at, regions = np.array(ids, np.int32), 0, []
    for k, part in enumerate(parts):
        inside = any(begin <= part.start < end for begin, end in part.regions)
        if part.start and not inside:
            tokens[at] = PENDING
        regions += [(k, *region) for region in part.regions]
        at += part.length
    return StepBatch(
        kind="mixed",
        rows=rows,
        starts=np.array([part.start for part in parts], np.int32),
        lengths=np.array([part.length for part in parts], np.int32),
        token_ids=tokens,
        outputs=np.array([part.sampled for part in parts], np.int32),
        pending=np.full(len(parts), PENDING, np.int32),
        bindings=(),
        pages=NO_UPDATES,
        side_inputs={VALUES: np.stack([tokens] * 2, axis=1)},
        regions=np.array(regions, np.int32) if regions else None,
        rotary=np.stack([tokens] * WIDTH),
    )


def seen(run: Run, bidirectional: bool) -> list[tuple[int, int, int]]:
    """(row, position, the end of the keys that it sees) of each query."""
    found = []
    for row, end, length in zip(run.rows.tolist(), run.ends.tolist(), run.lengths.tolist(), strict=True):
        positions = range(end - length, end)
        found += [(row, position, end if bidirectional else position + 1) for position in positions]
    return found


def with_features(plain: StepInputs) -> StepInputs:
    """One part for each input."""
    return replace(plain, kept={FEATURES: [(at, torch.zeros(1)) for at in range(len(plain.rows))]})


@given(st.lists(chunks(), min_size=1, max_size=4))
def test_every_query_sees_what_it_would_alone(parts: list[Chunk]) -> None:
    plain = lay_out(batch_of(parts), np.arange(len(parts), dtype=np.int32))
    ends = plain.positions + 1 if plain.limits is None else plain.limits
    step = segmented(with_features(plain))
    inputs = step.inputs
    found = seen(step.bidirectional, True) + seen(step.causal, False)
    assert [one[:2] for one in found] == list(zip(inputs.rows.tolist(), inputs.positions.tolist(), strict=True))
    assert sorted(found) == sorted(
        zip(plain.rows.tolist(), plain.positions.tolist(), ends.tolist(), strict=True)
    ), "each once"
    places = [at for at, _ in step.inputs.kept[FEATURES]]
    for name in ("rows", "positions", "token_ids", "values"):
        assert (getattr(inputs, name)[places] == getattr(plain, name)).all(), name
    assert inputs.rotary is not None
    assert plain.rotary is not None
    assert (inputs.rotary[:, places] == plain.rotary).all()
    assert (step.adapters[places] == np.repeat(plain.adapters, plain.lengths)).all()
    for name in ("output_inputs", "pending_inputs"):
        assert [places[at] for at in getattr(plain, name)] == getattr(inputs, name).tolist()


@given(st.lists(chunks(), min_size=1, max_size=3))
def test_an_image_stays_in_one_piece(parts: list[Chunk]) -> None:
    """Its features are copied to one run of inputs."""
    plain = lay_out(batch_of(parts), np.zeros(len(parts), np.int32))
    step = segmented(with_features(plain))
    places = [at for at, _ in step.inputs.kept[FEATURES]]
    first = 0
    for part in parts:
        for begin, end in part.regions:
            inside = places[first + max(begin - part.start, 0) : first + end - part.start]
            assert inside == list(range(inside[0], inside[0] + len(inside)))
        first += part.length


def test_a_step_of_text_is_one_causal_run() -> None:
    plain = lay_out(batch_of([Chunk(3, 2, [], True), Chunk(0, 4, [], False)]), np.zeros(2, np.int32))
    step = segmented(plain)
    assert step.inputs is plain
    assert (step.bidirectional.n_queries, step.causal.n_queries) == (0, 6)
    assert step.causal.ends.tolist() == [5, 4]
