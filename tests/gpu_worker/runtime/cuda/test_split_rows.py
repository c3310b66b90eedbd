"""Captured decodes whose rows are cut along their keys: where they are cut, when, and that they give the tokens of
the CPU path. `tests/gpu/test_split.py` has the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker.runtime.cuda import executor
from petiole.gpu_worker.runtime.cuda.attention import split
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    WORKSPACE_BYTES,
    AttentionKind,
    Geometry,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.cuda.attention.split import SplitWrappers, programs_at_once
from petiole.gpu_worker.runtime.cuda.fused.split import pieces as cuts
from petiole.gpu_worker.runtime.cuda.fused.split.pieces import (
    FIELDS,
    MOST_PIECES,
    PIECE,
    TILE,
    Pieces,
    most_pieces,
    piece_length,
)
from petiole.gpu_worker.runtime.cuda.graphs import new_wrappers
from petiole.gpu_worker.runtime.cuda.shapes import Shape
from tests.gpu_worker.models.test_generation import N_TOKENS, PROMPTS, oracle
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support import fake_flashinfer

HOPPER, PROCESSORS, KV_HEADS = (9, 0), 132, 8


def kind_of(heads, head_dim=128):
    return AttentionKind(heads, KV_HEADS, head_dim, 0.1, 0, 0.0)


def listed(lengths):
    indptr, last = (torch.from_numpy(array) for array in host_page_counts(np.array(lengths, np.int32), 1))
    pieces = Pieces.empty(len(lengths), max(lengths), torch.device("cpu"))
    fake_flashinfer.cut(indptr, last, 1, 0, 1, pieces)
    return pieces.listed[: pieces.count]


@pytest.mark.parametrize("lengths", [range(1, 3 * PIECE), range(MOST_PIECES * PIECE - 9, 140_000, 97)])
def test_pieces_are_whole_tiles_and_no_more_than_there_is_room_for(lengths):
    for length in lengths:
        each = piece_length(length)
        n = -(-length // each)
        assert each % TILE == 0
        assert n <= most_pieces(length) <= MOST_PIECES
        assert each <= PIECE or n > MOST_PIECES // 2, "as long as there is room, pieces are short"


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize(
    "mix", [lambda n: [640] * n, lambda n: [128] * (n - 1) + [32_768], lambda n: [64 + 9 * i for i in range(n)]]
)
def test_no_multiprocessor_reads_much_more_than_another(rows, mix):
    """A long row is split among all of them. On an H100 program p runs on multiprocessor p modulo 132."""
    lengths = mix(rows)
    programs = PROCESSORS * programs_at_once(kind_of(32), 1, HOPPER)
    loads = np.zeros(PROCESSORS)
    for item in range(len(pieces := listed(lengths)) * KV_HEADS):
        _, begin, end, *_ = pieces[item // KV_HEADS].tolist()
        loads[item % programs % PROCESSORS] += end - begin
    assert loads.sum() == KV_HEADS * sum(lengths)
    assert loads.max() < 1.15 * loads.mean()


@pytest.mark.parametrize(
    ("card", "heads", "head_dim", "expected"),
    [((9, 0), 32, 128, 3), ((9, 0), 128, 128, 2), ((9, 0), 32, 256, 2), ((8, 0), 32, 128, 2), ((8, 6), 8, 64, 1)],
)
def test_a_launch_has_as_many_programs_as_the_card_runs_at_a_time(card, heads, head_dim, expected):
    assert programs_at_once(kind_of(heads, head_dim), 1, card) == expected


@pytest.fixture
def cpu_path(monkeypatch):
    """The executor is replaced: what the CPU would have computed with makes no difference."""
    monkeypatch.setenv("PETIOLE_NATIVE", "off")


@pytest.fixture(params=[1, 16])
def open_cuda(request, open_runtime, monkeypatch, cpu_path):
    """With pieces of four positions, at most eight of a row, and heads as the test models have them."""
    monkeypatch.setenv("PETIOLE_UNTIMED", "split")
    for name, value in (("PIECE", 4), ("TILE", 2), ("MOST_PIECES", 8)):
        monkeypatch.setattr(cuts, name, value)
    monkeypatch.setattr(split, "_HEAD_SIZES", (16, 32, 64))
    monkeypatch.setattr(fake_flashinfer, "PROCESSORS", 1)
    fake_flashinfer.install(monkeypatch)

    def get(folder, **settings):
        settings = {"page_size": request.param, "prefix_cache": "off", "chunk_size": 32} | settings
        return fake_flashinfer.compute_as_on_cuda(open_runtime(folder, **settings))

    return get


@pytest.fixture
def attended(monkeypatch):
    """How many pieces the rows of each layer have had."""
    found, run = [], split.SplitWrapper.run

    def spy(self, *args, **options):
        found.append(self.pieces.of_rows[2].tolist())
        return run(self, *args, **options)

    monkeypatch.setattr(split.SplitWrapper, "run", spy)
    return found


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "gpt-oss"])
def test_tokens_are_those_of_transformers(family, checkpoint, open_cuda, attended):
    """With windows, capped scores and sinks."""
    folder, model = checkpoint(family)
    driver = Driver(open_cuda(folder, graph_batch_sizes=(2, 4)))
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (70, 3, 19)]
    driver.prefill(sequences)
    for _ in range(3):
        got = table(driver.decode(sequences))
        expected = [reference(model, one.prompt + one.output[:-1])[-1] for one in sequences]
        assert relative_error(got, np.array(expected)) < 1e-4
    assert max(max(pieces) for pieces in attended) > 1


def test_two_steps_in_flight_and_verifications(checkpoint, open_cuda, attended):
    folder, model = checkpoint("qwen3")
    runtime = open_cuda(folder, speculative_tokens=3, graph_batch_sizes=(2, 4))
    assert Driver(runtime).generate(PROMPTS, N_TOKENS, depth=2) == [oracle(model, prompt) for prompt in PROMPTS]
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (40, 21)]
    driver.prefill(sequences)
    history = [one.prompt + one.output for one in sequences]
    attended.clear()
    got = table(driver.verify(sequences, [[7, 8, 9], [11]]))
    assert attended
    expected = [reference(model, [*history[0], 7, 8, 9])[-4:], reference(model, [*history[1], 11])[-2:]]
    assert relative_error(got, np.concatenate(expected)) < 1e-4


def test_rows_are_split_where_flashinfer_does_not_if_that_is_tried(checkpoint, open_cuda, monkeypatch):
    runtime = open_cuda(checkpoint("qwen3")[0])
    geometry = Geometry(runtime._decoder.plan, runtime._memory.cache, torch.float32)
    indices = torch.zeros(512, dtype=torch.int32)
    workspace = new_workspace(geometry.device)

    def splits(rows, queries=1):
        found = new_wrappers(geometry, Shape(rows, rows * queries, queries), workspace, indices)
        return isinstance(found, SplitWrappers)

    assert splits(1)
    assert splits(4, 8)
    assert not splits(4, 9), "of 18 queries, sums do not fit into registers"
    monkeypatch.setattr(fake_flashinfer, "PROCESSORS", 4)
    fake_flashinfer.install(monkeypatch)
    assert [splits(rows) for rows in (1, 3, 4)] == [False, False, True]
    monkeypatch.setenv("PETIOLE_UNTIMED", "codes")
    assert not splits(4)


def test_parts_and_lists_are_counted(checkpoint, open_runtime, monkeypatch):
    """Parts as soon as they need more than FlashInfer's sums."""
    runtime = open_runtime(checkpoint("qwen3")[0])
    (layer, *_) = runtime._decoder.plan.layers
    mixer = dataclasses.replace(layer.attention, heads=64, kv_heads=8, head_dim=128)
    plan = dataclasses.replace(runtime._decoder.plan, layers=(dataclasses.replace(layer, mixer=mixer),))
    config = dataclasses.replace(runtime.config, max_num_seqs=256, max_model_len=40_000)
    needed = []
    for untimed in ("off", "split"):
        monkeypatch.setenv("PETIOLE_UNTIMED", untimed)
        needed.append(executor.working_bytes(config, plan, 2))
    kind = AttentionKind.of(mixer)
    parts = split.part_bytes(kind, 256, 1, 40_000)
    assert needed[1] - needed[0] == parts - WORKSPACE_BYTES > 0
    assert split.list_bytes(256, 40_000) == 256 * MOST_PIECES * FIELDS * 4
