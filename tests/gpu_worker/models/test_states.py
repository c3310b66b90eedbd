"""Mixers that keep a state: the rule in chunks and position by position, what a step does with states, and what is
refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.contract.settings.engine import BATCHING, EngineConfig
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import find_model, model_of
from petiole.gpu_worker.models.parts.recurrent.delta_rule import CHUNK, delta_rule
from petiole.gpu_worker.models.parts.recurrent.scan import scan
from petiole.gpu_worker.models.parts.recurrent.states import convolved
from petiole.gpu_worker.runtime.memory.room import (
    LEAST_SNAPSHOTS,
    page_bytes,
    pages_in,
    pool_bytes,
    snapshots_of,
)
from petiole.gpu_worker.runtime.memory.states import state_bytes
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import SHAPE, WITH_STATES

SIZES = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def inputs(n, rows=2, heads=3, key=8, value=5):
    q, k = (torch.nn.functional.normalize(drawn(rows, n, heads, key, seed=seed), dim=-1) for seed in (0, 1))
    g, beta = -drawn(rows, n, heads, seed=2).exp(), drawn(rows, n, heads, seed=3).sigmoid()
    return q, k, drawn(rows, n, heads, value, seed=4), g, beta, drawn(rows, heads, key, value, seed=5)


def by_definition(q, k, v, g, beta, stored):
    """In float64, as the module's docstring has it."""
    q, k, v, g, beta, stored = (x.double() for x in (q, k, v, g, beta, stored))
    outputs = []
    for i in range(q.shape[1]):
        stored = stored * g[:, i, :, None, None].exp()
        seen = torch.einsum("nhk,nhkv->nhv", k[:, i], stored)
        stored = stored + torch.einsum("nhk,nhv->nhkv", k[:, i], beta[:, i, :, None] * (v[:, i] - seen))
        outputs.append(torch.einsum("nhk,nhkv->nhv", q[:, i], stored))
    return torch.stack(outputs, 1), stored


@pytest.mark.parametrize("n", SIZES)
def test_the_rule_is_its_definition(n):
    outputs, stored = delta_rule(*inputs(n))
    expected, after = by_definition(*inputs(n))
    assert relative_error(outputs, expected) < 1e-6
    assert relative_error(stored, after) < 1e-6


@pytest.mark.parametrize("fading", [-40.0, -1e-4, 0.0])
def test_what_fades_at_once_and_what_never_fades(fading):
    q, k, v, g, beta, stored = inputs(100)
    given = q, k, v, torch.full_like(g, fading), beta, stored
    outputs, after = delta_rule(*given)
    expected, stored = by_definition(*given)
    assert relative_error(outputs, expected) < 1e-5
    assert relative_error(after, stored) < 1e-5


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("fading", [1.0, 0.0, 40.0])
def test_the_scan_is_its_definition(n, fading):
    rows, groups, heads, state, width = 2, 2, 6, 8, 5
    q, k = (drawn(rows, n, groups, state, seed=seed) for seed in (0, 1))
    v, g = drawn(rows, n, heads, width, seed=2), -fading * drawn(rows, n, heads, seed=3).exp()
    stored = drawn(rows, heads, state, width, seed=4)
    outputs, after = scan(q, k, v, g, stored)
    q, k, v, g, stored = (x.double() for x in (q, k, v, g, stored))
    q, k = (x.repeat_interleave(heads // groups, dim=2) for x in (q, k))
    expected = []
    for i in range(n):
        stored = stored * g[:, i, :, None, None].exp() + torch.einsum("nhs,nhw->nhsw", k[:, i], v[:, i])
        expected.append(torch.einsum("nhs,nhsw->nhw", q[:, i], stored))
    assert relative_error(outputs, torch.stack(expected, 1)) < 1e-5
    assert relative_error(after, stored) < 1e-5


def test_a_convolution_cut_anywhere_keeps_its_bits():
    x, before, kernel, bias = drawn(2, 30, 6), drawn(2, 3, 6), drawn(6, 4), drawn(6)
    whole, after = convolved(x, before, kernel, bias)
    for cut in range(1, 30):
        first, between = convolved(x[:, :cut], before, kernel, bias)
        second, end = convolved(x[:, cut:], between, kernel, bias)
        assert torch.equal(torch.cat([first, second], 1), whole)
        assert torch.equal(end, after)


@pytest.mark.parametrize("family", sorted(WITH_STATES))
def test_a_long_prompt_in_cuts_and_behind_a_snapshot(family, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder))
    ids = tokens(2 * CHUNK + 40)
    first = driver.sequence(ids, ALL)
    for position in (1, CHUNK + 3, 2 * CHUNK + 39):
        driver.keep(first, position)
    driver.prefill([first], [CHUNK // 2])
    driver.prefill([first], [CHUNK + 9])
    got = table(driver.prefill([first]))
    assert relative_error(got, reference(model, ids)[-1:]) < 1e-5
    for position in first.snapshots:
        other = driver.fork(first, ids[:position] + tokens(5, seed=position), position)
        got = table(driver.prefill([other]))
        assert relative_error(got, reference(model, other.prompt)[-1:]) < 1e-5


@pytest.mark.parametrize("family", sorted(WITH_STATES))
def test_a_row_begins_anew_whatever_was_in_it(family, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder, max_num_seqs=1))
    for seed in range(3):
        sequence = driver.sequence(tokens(20, seed), ALL)
        got = table(driver.prefill([sequence]))
        driver.finish(sequence)
        assert relative_error(got, reference(model, sequence.prompt)[-1:]) < 1e-5


def test_prompts_decodes_and_copies_share_a_step(checkpoint, open_runtime):
    folder, model = checkpoint("qwen3.5")
    driver = Driver(open_runtime(folder))
    decoding = [driver.sequence(tokens(n, seed=n), ALL) for n in (9, 30)]
    driver.prefill(decoding)
    driver.keep(decoding[0], 10)
    coming = [driver.sequence(tokens(n, seed=n), ALL) for n in (25, 1)]
    driver.keep(coming[0], 12)
    before = [len(s.prompt) + len(s.output) for s in decoding]
    both = [*decoding, *coming]
    step = driver.launch("mixed", both, [[-1], [-1], coming[0].prompt, coming[1].prompt], [1] * 4)
    got = table(driver.finish_step(*step))
    seen = [
        *((s.prompt + s.output)[:n] for s, n in zip(decoding, before, strict=True)),
        *(s.prompt for s in coming),
    ]
    assert relative_error(got, np.array([reference(model, ids)[-1] for ids in seen])) < 1e-5
    for origin, position in ((decoding[0], 10), (coming[0], 12)):
        fork = driver.fork(origin, [*(origin.prompt + origin.output)[:position], 5, 6], position)
        assert relative_error(table(driver.prefill([fork])), reference(model, fork.prompt)[-1:]) < 1e-5


def test_a_step_that_does_not_begin_where_the_state_is_fails(checkpoint, open_runtime):
    driver = Driver(open_runtime(checkpoint("lfm2")[0]))
    sequence = driver.sequence(tokens(9), ALL)
    driver.prefill([sequence], [5])
    sequence.length = 4  # as if the fifth position had been taken back
    with pytest.raises(Exception, match="a state is not where its step begins"):
        driver.prefill([sequence])


# ---------------------------------------------------------------- sizes


def plan_of(family, checkpoint):
    return find_model(checkpoint(family)[0]).plan


def test_the_bytes_of_a_state(checkpoint):
    of_nets, of_convolutions = (state_bytes(plan_of(name, checkpoint), 2) for name in ("qwen3.5", "lfm2"))
    assert of_nets == 2 * (4 * 4 * 16 * 24 + 2 * 3 * (2 * 32 + 96))
    assert of_convolutions == 2 * 2 * 2 * 64
    assert state_bytes(plan_of("qwen3", checkpoint), 2) == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "lfm2"])
def test_snapshots_take_as_much_memory_as_keys_and_values(family, checkpoint):
    config, plan = EngineConfig().decided(BATCHING["cpu"]), plan_of(family, checkpoint)
    each, state = page_bytes(config, plan, 4), state_bytes(plan, 4)
    for n_pages in (2, 100, 3000):
        n = snapshots_of(config, plan, 4, n_pages)
        assert n == (1 + max(min(n_pages * each // state, n_pages), LEAST_SNAPSHOTS) if state else 0)
        assert pool_bytes(config, plan, 4, n_pages) == n_pages * each + n * state
    room = pool_bytes(config, plan, 4, 500)
    assert pages_in(config, plan, 4, room) == 500
    assert pages_in(config, plan, 4, room - 1) == 499
    if state:
        assert snapshots_of(replace(config, prefix_cache="off"), plan, 4, 3000) == 2


# ---------------------------------------------------------------- refusals


def test_weights_with_other_states_are_refused(checkpoint, open_runtime, tmp_path):
    from tests.support.families import build_model

    runtime = open_runtime(checkpoint("lfm2")[0])
    build_model("lfm2", conv_L_cache=4).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        runtime.prepare_reload(str(tmp_path))


RAW = SHAPE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 4,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "linear_num_key_heads must divide 4 heads of values, got 3"),
        ({"linear_num_key_heads": 2, "layer_types": ["mamba"] * 3}, "must be linear_attention or full_attention"),
        ({"linear_num_key_heads": 2, "output_gate_type": "gelu"}, "output_gate_type must be silu"),
        (
            {"linear_num_key_heads": 2, "linear_conv_kernel_dim": 0},
            "linear_conv_kernel_dim must be a whole number",
        ),
    ],
)
def test_configurations_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        model_of(RAW | changes)


GRANITE = SHAPE | {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 3}, "layer_types must be attention or .* got conv"),
        ({"mamba_d_head": 24}, "mamba_d_head must be mamba_expand times hidden_size, 128, .* got 24"),
        ({"mamba_n_groups": 3}, "mamba_n_groups must divide 8 heads, got 3"),
        ({"time_step_limit": [0.1, 1.0]}, "time_step_limit must be 0 to infinity"),
        ({"mamba_d_conv": 0}, "mamba_d_conv must be a whole number"),
        ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok must be at most 2"),
    ],
)
def test_configurations_of_mamba_that_make_no_sense_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        model_of(GRANITE | changes)


def test_names_of_layers_in_older_and_newer_configurations():
    kinds = ["mamba", "attention", "mamba"], ["linear_attention", "full_attention", "linear_attention"]
    old, new = (model_of(GRANITE | {"layer_types": one}).plan for one in kinds)
    assert old == new
    assert [i for i, _ in old.recurrent] == [0, 2]


def test_layers_without_a_list_of_kinds():
    raw = RAW | {"linear_num_key_heads": 2, "num_hidden_layers": 8, "full_attention_interval": 4}
    plan = model_of(raw).plan
    assert [i for i, _ in plan.attending] == [3, 7]
    assert replace(plan, layers=plan.layers[:3]).kept_windows == (0, 0, 0)
