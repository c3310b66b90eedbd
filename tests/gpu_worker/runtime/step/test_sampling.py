"""Each sampler draws from the distribution that it names, and each draw depends on its own request alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cpu.executor import choose, draw as compiled_draw
from petiole.gpu_worker.runtime.device.device import packed, unpacked
from petiole.gpu_worker.runtime.interface import PENDING, PageUpdates, RowBinding, StepBatch, TokenMask
from petiole.gpu_worker.runtime.step import rows
from petiole.gpu_worker.runtime.step.inputs import StepStates, lay_out
from petiole.gpu_worker.runtime.step.noise import gumbel, noise_keys
from petiole.gpu_worker.runtime.step.rows import RowStates, sampled_with
from petiole.gpu_worker.runtime.step.sampler import OutputSampler
from petiole.gpu_worker.runtime.step.sampling import apply_bits, apply_penalties, bar, logprobs
from petiole.gpu_worker.runtime.step.verify import accept

N = 20_000


def batch(rows, starts, outputs=None, token_ids=None):
    n = len(rows)
    outputs = np.array(outputs or [1] * n, dtype=np.int32)
    return StepBatch(
        kind="decode",
        rows=np.array(rows, dtype=np.int32),
        starts=np.array(starts, dtype=np.int32),
        lengths=outputs,
        token_ids=np.array(token_ids or [PENDING] * n, dtype=np.int32),
        outputs=outputs,
        pending=np.full(n, PENDING, dtype=np.int32),
        bindings=(),
        pages=PageUpdates(*(np.empty(0, dtype=np.int32) for _ in range(3))),
    )


def bind(row, sampling, seed=1, prompt=(), output=()):
    return RowBinding(row, sampling, seed, np.array(prompt, dtype=np.int32), np.array(output, dtype=np.int32))


def planned(states, step):
    bound = states.bound(step.rows)
    return states.plan_outputs(step, lay_out(step, bound.adapters), bound)


def choice_of(plan):
    return sampled_with(plan, lambda arrays: unpacked(packed(arrays, pinned=False), arrays)).choice


def draw(logits, sampling, n=N):
    """Frequencies of n draws for one request at n positions."""
    states = RowStates(2, len(logits), torch.device("cpu"))
    states.bind([bind(1, sampling)])
    plan = planned(states, batch([1] * n, range(n)))
    tokens = choose(torch.tensor(logits).expand(n, -1).float(), choice_of(plan))
    return np.bincount(tokens.numpy(), minlength=len(logits)) / n


def assert_same_distribution(frequencies, probabilities, n=N):
    """Five standard deviations in each cell."""
    spread = np.sqrt(probabilities * (1 - probabilities) / n)
    assert np.all(np.abs(frequencies - probabilities) <= 5 * spread + 1e-12)


def softmax(x):
    e = np.exp(np.asarray(x) - np.max(x))
    return e / e.sum()


LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -3.0, 0.2, -1.0, 0.9]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
    frequencies = draw(LOGITS, SamplingParams(temperature=temperature))
    assert_same_distribution(frequencies, softmax(np.array(LOGITS) / temperature))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.05),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=5, top_p=0.7),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_filters_agree_with_those_of_transformers(sampling):
    warpers = pytest.importorskip("transformers").generation.logits_process
    scores = torch.tensor([LOGITS])
    scores = (
        warpers.TemperatureLogitsWarper(sampling.temperature)(None, scores)
        if sampling.temperature != 1
        else scores
    )
    if sampling.top_k:
        scores = warpers.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = warpers.TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = warpers.MinPLogitsWarper(sampling.min_p)(None, scores)
    assert_same_distribution(draw(LOGITS, sampling), scores.softmax(-1)[0].double().numpy())


def test_top_p_over_a_large_vocabulary_needs_no_full_sort_and_gives_the_same():
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(5000, generator=generator) * 4
    flat = torch.randn(5000, generator=generator) * 0.1
    for logits in (peaked, flat):
        frequencies = draw(logits.tolist(), SamplingParams(top_p=0.5), n=2000)
        order = logits.argsort(descending=True)
        mass = logits.softmax(-1)[order].cumsum(0)
        kept = set(order[: int((mass < 0.5).sum()) + 1].tolist())
        assert set(np.flatnonzero(frequencies)) <= kept


def test_a_draw_does_not_depend_on_its_batch():
    device = torch.device("cpu")
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, temperature=1.7),
        SamplingParams(top_k=3, top_p=0.5),
    ]
    states = RowStates(len(samplings) + 1, 300, device)
    states.bind([bind(i + 1, s, seed=i * 7 + 1) for i, s in enumerate(samplings)])
    logits = torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(1)) * 3
    rows = list(range(1, len(samplings) + 1))
    together = choose(logits, choice_of(planned(states, batch(rows, [50] * len(rows)))))
    for row in rows:
        plan = planned(states, batch([row], [50]))
        assert choose(logits[row - 1 : row], choice_of(plan)).item() == together[row - 1].item()


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(top_k=50), SamplingParams(top_k=50, top_p=0.9), SamplingParams(top_p=0.9)],
    ids=["top_k", "top_k and top_p", "top_p"],
)
@pytest.mark.parametrize(
    "companion", [SamplingParams(), SamplingParams(top_k=4000), SamplingParams(top_p=0.99)], ids=str
)
def test_equal_logits_are_drawn_from_alike_in_every_batch(sampling, companion):
    logits = (torch.randn(8192, generator=torch.Generator().manual_seed(0)) * 12).round() / 4
    states = RowStates(3, 8192, torch.device("cpu"))
    states.bind([bind(1, sampling), bind(2, companion)])

    def drawn(rows, scores):
        plan = planned(states, batch(rows, range(len(rows))))
        return choose(scores, choice_of(plan))

    alone = drawn([1] * 500, logits.expand(500, -1))
    beside = drawn([1] * 500 + [2], torch.cat([logits.expand(500, -1), torch.randn(1, 8192) / 100]))
    assert torch.equal(alone, beside[:500])


def test_equal_logits_stay_or_go_together():
    logits = [9.0] + [4.0] * 20 + [0.0] * 979
    for sampling in (SamplingParams(temperature=9, top_k=2), SamplingParams(temperature=9, top_k=21, top_p=0.1)):
        assert set(np.flatnonzero(draw(logits, sampling))) == set(range(21))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-320])
def test_the_coldest_draw_is_the_likeliest(temperature):
    for sampling in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.5)):
        assert draw([2.0, 30.0, 31.0, -4.0], sampling, n=50)[2] == 1


def test_a_top_k_beyond_the_vocabulary_is_all_of_it():
    assert np.array_equal(draw(LOGITS, SamplingParams(top_k=10**30), n=500), draw(LOGITS, SamplingParams(), n=500))


@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_logits_that_are_no_numbers_give_some_token(sampling):
    for n_numbers in (0, 47):
        logits = [float("nan")] * (48 - n_numbers) + [0.0] * n_numbers
        assert draw(logits, SamplingParams(**sampling), n=3).sum() == 1


def test_a_greedy_batch_needs_no_sampler():
    states = RowStates(3, 50, torch.device("cpu"))
    states.bind([bind(1, SamplingParams(temperature=0.0, top_k=5)), bind(2, SamplingParams(temperature=0.0))])
    assert choice_of(planned(states, batch([1, 2], [4, 9]))) is None


def test_noise_is_a_standard_gumbel_and_differs_between_seeds_and_positions():
    keys = noise_keys(np.arange(50, dtype=np.uint64).repeat(4), np.tile(np.arange(4), 50))
    noise = gumbel(torch.from_numpy(keys), torch.arange(5000, dtype=torch.int32))
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.005
    assert abs(float(noise.var()) - 1.6449) < 0.02
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 0.08


def test_noise_of_a_token_is_the_same_among_few_candidates_as_among_all():
    keys = torch.from_numpy(noise_keys(np.array([9, 10], dtype=np.uint64), np.array([3, 3])))
    everything = gumbel(keys, torch.arange(1000, dtype=torch.int32))
    some = torch.tensor([[5, 999, 12], [0, 7, 300]], dtype=torch.int32)
    assert torch.equal(gumbel(keys, some), everything.gather(1, some.long()))


def test_penalties_are_those_of_transformers_and_of_the_usual_api():
    states = RowStates(3, 10, torch.device("cpu"))
    sampling = SamplingParams(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    states.bind([bind(1, sampling), bind(2, SamplingParams())])
    states.apply_bindings([bind(1, sampling, prompt=[1, 2], output=[2, 3, 3])])
    rows = torch.tensor([1, 2])
    numbers = torch.tensor([[1.5, 1.0], [0.3, 0.0], [0.2, 0.0]])
    logits = torch.tensor(LOGITS).expand(2, -1).clone()
    got = apply_penalties(logits, states.penalties(rows, numbers, None))
    expected = torch.tensor(LOGITS)
    for token in (1, 2, 3):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[2] -= 0.3 + 0.2
    expected[3] -= 0.3 + 0.4
    assert torch.allclose(got[0], expected)
    assert torch.equal(got[1], torch.tensor(LOGITS))


def test_a_row_starts_clean_for_its_next_sequence():
    states = RowStates(2, 10, torch.device("cpu"))
    sampling = SamplingParams(frequency_penalty=1.0)
    states.apply_bindings([bind(1, sampling, prompt=[4], output=[5, 5])])
    states.count(torch.tensor([1]), torch.tensor([6]), None)
    states.apply_bindings([bind(1, sampling, prompt=[7])])
    penalties = states.penalties(torch.tensor([1]), torch.ones(3, 1), None)
    assert penalties.counts.sum() == 0
    assert penalties.seen.nonzero().tolist() == [[0, 7]]


def test_bias_bans_and_allowed_tokens():
    states = RowStates(4, 6, torch.device("cpu"))
    states.apply_bindings(
        [
            bind(1, SamplingParams(logit_bias={2: 5.0}, banned_token_ids=[3])),
            bind(2, SamplingParams(allowed_token_ids=[1, 4], banned_token_ids=[4])),
        ]
    )
    bias = states.bias(torch.tensor([1, 2, 3]), torch.tensor([True, True, False]))
    inf = float("inf")
    assert bias.tolist() == [[0, 0, 5, -inf, 0, 0], [-inf, 0, -inf, -inf, -inf, -inf], [0] * 6]


def test_packed_masks_forbid_the_rest():
    bits = np.zeros((1, 3), dtype=np.int32)
    for token in (0, 31, 32, 69):
        bits[0, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    logits = apply_bits(torch.zeros(2, 70), torch.tensor([1]), torch.from_numpy(bits))
    assert logits[0].isfinite().all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 31, 32, 69]


def ending(row, prompt, ends, **sampling):
    return replace(bind(row, SamplingParams(**sampling), prompt=[0] * prompt), end_token_ids=ends)


def test_an_output_is_early_by_its_own_position():
    states = RowStates(4, 10, torch.device("cpu"))
    rows = enumerate([(5, 3), (7, 1), (5, 0)], 1)
    states.bind([ending(row, n_prompt, [row, 9], min_tokens=n) for row, (n_prompt, n) in rows])
    first, second = [[0, 1], [0, 9]], [[1, 2], [1, 9]]
    for starts, ends in [((4, 6, 4), first + second), ((6, 7, 9), first), ((7, 7, 4), [])]:
        assert planned(states, batch([1, 2, 3], starts)).ends.tolist() == ends
    verify = replace(batch([1, 3], [5, 5], outputs=[4, 1], token_ids=[PENDING, 1, 2, 3, PENDING]), kind="verify")
    assert planned(states, verify).ends.tolist() == [*first, [1, 1], [1, 9]]


def test_end_tokens_are_those_of_the_rows_last_sequence():
    states = RowStates(3, 10, torch.device("cpu"))
    for ends in ([1, 2], [9, 4, 10]):  # the tokenizer's token 10 is none of the model's
        states.bind([ending(1, 1, [], min_tokens=1), ending(2, 1, ends, min_tokens=1)])
    assert planned(states, batch([1, 2], [0, 0])).ends.tolist() == [[1, 4], [1, 9]]
    states.bind([ending(2, 1, [3])])
    assert planned(states, batch([1, 2], [0, 0])).ends.tolist() == []


def test_whole_rows_are_read_only_where_nothing_but_ends_may_be_left():
    states = RowStates(6, 4, torch.device("cpu"))
    limited = [{}, {"logit_bias": {0: 1.0}}, {"allowed_token_ids": [1, 2]}, {}]
    bindings = [ending(row, 1, [1, 3], min_tokens=1, **options) for row, options in enumerate(limited, 1)]
    states.bind([*bindings, ending(5, 1, range(4), min_tokens=1)])
    plan = planned(states, batch([1, 2, 3, 4, 5], [0] * 5))
    assert plan.narrowed(None).tolist() == [1, 2, 4]
    mask = TokenMask(np.array([3], np.int32), np.zeros((1, 1), np.int32))
    assert plan.narrowed(mask).tolist() == [1, 2, 3, 4]
    free = planned(states, batch([1, 4], [0, 0]))
    assert free.narrowed(None).tolist() == []


@given(
    vocab=st.integers(1, 6),
    rows=st.lists(st.tuples(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5))), min_size=1, max_size=5),
)
def test_banned_tokens_are_spared_where_they_are_all_that_is_left(vocab, rows):
    """`rows`: the tokens that a mask has taken, and those banned."""
    logits = torch.arange(1.0, 1 + len(rows) * vocab).view(-1, vocab)
    expected, banned = logits.tolist(), []
    for i, (masked, ends) in enumerate(rows):
        for token in (t for t in masked if t < vocab):
            logits[i, token] = expected[i][token] = -math.inf
        ends = [t for t in ends if t < vocab]
        banned += [[i, token] for token in ends]
        if not set(range(vocab)) <= masked.union(ends):
            for token in ends:
                expected[i][token] = -math.inf
    pairs = torch.tensor(banned, dtype=torch.int64).view(-1, 2)
    narrowed = torch.tensor([i for i, (masked, ends) in enumerate(rows) if masked or ends], dtype=torch.int64)
    assert bar(logits.clone(), pairs, narrowed).tolist() == expected
    free = torch.full((len(rows), vocab + 1), 0.5)
    without = bar(free.clone(), pairs)
    assert (without == -math.inf).nonzero().tolist() == sorted(banned)


def test_compiled_drawing_gives_the_tokens_of_torch():
    generator = torch.Generator().manual_seed(3)
    keys = torch.from_numpy(noise_keys(np.arange(400, dtype=np.uint64), np.arange(400)))
    for vocab, spread in ((1, 1.0), (33, 2.0), (1000, 0.0), (5003, 4.0)):
        scores = torch.randn(400, vocab, generator=generator) * spread
        scores[:, 1::3] = float("-inf")
        compiled = compiled_draw(scores, keys)
        if compiled is None:
            pytest.skip("no C compiler")
        plain = (scores + gumbel(keys, torch.arange(vocab, dtype=torch.int32))).argmax(-1)
        assert (compiled == plain).float().mean() > 0.995  # all but ties to the last bit of a logarithm


def test_there_is_room_for_more_flags_of_what_a_row_uses(monkeypatch):
    ninth = 1 << 8
    monkeypatch.setattr(rows, "uses_of", lambda sampling: ninth | rows.Uses.DRAW)
    states = RowStates(2, 10, torch.device("cpu"))
    states.bind([bind(1, SamplingParams())])
    assert planned(states, batch([1], [4])).uses == ninth | rows.Uses.DRAW


def test_drafts_before_an_output_count_for_penalties_where_a_row_has_some():
    """Against a loop, over rows of every length; no pair is built for a step without penalties."""
    lengths = np.array([1, 4, 3, 2, 5], np.int32)
    token_ids = np.arange(100, 100 + lengths.sum(), dtype=np.int32)
    places = [1, 2, 3, 4, 5]
    for penalised in ([], [2, 4], places):
        states = RowStates(6, 300, torch.device("cpu"))
        for row in places:
            sampling = SamplingParams(presence_penalty=0.5 * (row in penalised))
            states.bind([RowBinding(row, sampling, 1, np.ones(1, np.int32), np.empty(0, np.int32))])
        step = batch(places, [7] * 5, outputs=lengths.tolist(), token_ids=token_ids.tolist())
        plan = planned(states, replace(step, kind="verify", lengths=lengths))
        expected, drafts, at = [], [], 0
        for row, n in zip(places, lengths.tolist(), strict=True):
            for i in range(n):
                drafts.append(int(token_ids[at + i + 1]) if i + 1 < n else -1)
                expected += [(at + i, int(token_ids[at + j])) for j in range(1, i + 1) if row in penalised]
            at += n
        assert sorted(map(tuple, plan.draft_pairs.tolist())) == sorted(expected)
        assert plan.drafts[3 * step.size :].tolist() == drafts


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=8))
def test_a_row_takes_its_drafts_up_to_and_with_the_first_that_differs(rows_of):
    """rows_of: how many outputs a row has, and the place of its wrong draft."""
    counts, wrong = np.array(rows_of, np.int32).T
    if counts.max() < 2:
        counts[0] = 2
    tokens = np.arange(100, 100 + counts.sum())
    inputs, at, expected, last = [], 0, [], np.full(len(counts) + 1, -1)
    for row, (n, refused) in enumerate(zip(counts.tolist(), wrong.tolist(), strict=True), 1):
        drafts = [int(t) + (i == refused) for i, t in enumerate(tokens[at : at + n - 1])]
        inputs += [PENDING, *drafts] if n else [7]  # a chunk that is not a prompt's last samples nothing
        expected.append(min(n, refused + 1))
        if n:
            last[row] = tokens[at + expected[-1] - 1]
        at += n
    states = RowStates(len(counts) + 1, 300, torch.device("cpu"))
    states.pending.token_ids.fill_(-1)
    step = batch(range(1, len(counts) + 1), [3] * len(counts), outputs=counts.tolist(), token_ids=inputs)
    step = replace(step, kind="mixed", lengths=np.maximum(counts, 1))
    plan = planned(states, step)
    sampled = torch.from_numpy(tokens), None, torch.from_numpy(plan.drafts), step.size
    shown, accepted = accept(*sampled, states.pending)
    assert shown.tolist() == tokens.tolist()
    assert accepted.tolist() == expected
    assert states.pending.token_ids.tolist() == last.tolist()


class Alike:
    """A head that thinks as the model does: of the row at each place, the model's logits behind the next one."""

    def __init__(self, logits):
        self.logits, self.n = logits, 0

    def first(self, following, at):
        return self.logits[at, 0]

    def again(self, token_ids, going):
        self.n += 1
        return self.logits[going, self.n]


DRAWN = OutputSampler._drawn
OTHERWISE = {
    "as the tokens will be": DRAWN,
    "with noise of other positions": lambda self, logits, plan, *more: DRAWN(
        self, logits, replace(plan, positions=plan.positions + 1), *more
    ),
    "without penalties": lambda self, logits, plan, *more: DRAWN(
        self, logits, replace(plan, uses=plan.uses & ~rows.Uses.PENALTIES), *more
    ),
    "the likeliest": lambda self, logits, plan, *more: logits.argmax(-1),
}


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_head_that_thinks_alike_drafts_the_tokens_that_are_drawn(how, monkeypatch):
    monkeypatch.setattr(OutputSampler, "_drawn", OTHERWISE[how])
    torch.manual_seed(0)
    n, k, vocab = 40, 3, 12
    places = list(range(1, n + 1))
    states = RowStates(n + 1, vocab, torch.device("cpu"), n_drafts=k)
    sampler = OutputSampler(states, lambda arrays: [torch.from_numpy(array) for array in arrays], choose, accept)
    for row in places:
        filters = {"top_k": 8} if row % 3 == 0 else {"top_p": 0.9} if row % 3 == 1 else {}
        binding = bind(row, SamplingParams(temperature=0.9, frequency_penalty=2.0, **filters), seed=row)
        states.bind([binding])
        states.apply_bindings([binding])
    logits = torch.randn(n, k + 2, vocab)

    def sampled(step, given, head=None):
        made = sampler.sample(planned(states, step), step, StepStates(lambda: given, head=head), None)
        return {name: tensor.tolist() for name, tensor in made.items()}

    first = replace(batch(places, [9] * n), ahead=np.full(n, k, np.int32))
    drafts = sampled(first, logits[:, 0], Alike(logits[:, 1:]))["drafts"]
    inputs = [token for own in drafts for token in (PENDING, *own)]
    step = replace(batch(places, [10] * n, [1 + k] * n, inputs), kind="verify")
    accepted = sampled(step, logits[:, 1:].reshape(-1, vocab))["accepted"]
    assert (accepted == [1 + k] * n) == (how == "as the tokens will be")


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, True),
        ({"temperature": 1e-6}, False),
        ({"logit_bias": {3: 2.0}}, False),
        ({"presence_penalty": 0.5}, False),
    ],
    ids=["greedy", "drawn", "with a bias", "with a penalty"],
)
def test_tokens_that_the_forward_has_found_are_taken_only_where_nothing_changes_logits(more, known):
    states = RowStates(3, 12, torch.device("cpu"))
    sampler = OutputSampler(states, lambda arrays: [torch.from_numpy(array) for array in arrays], choose, accept)
    for row, own in ((1, {}), (2, more)):
        binding = bind(row, SamplingParams(**{"temperature": 0.0} | own), seed=row)
        states.bind([binding])
        states.apply_bindings([binding])
    step, logits = batch([1, 2], [9, 9]), torch.eye(12)[[4, 5]]
    found = torch.tensor([7, 8])
    made = sampler.sample(planned(states, step), step, StepStates(lambda: logits, likeliest=found), None)
    assert (made["token_ids"].tolist() == [7, 8]) == known
    if not known:
        assert made["token_ids"][0] == 4


def test_tokens_that_the_forward_has_found_are_not_taken_where_a_grammar_forbids_some():
    states = RowStates(2, 32, torch.device("cpu"))
    sampler = OutputSampler(states, lambda arrays: [torch.from_numpy(array) for array in arrays], choose, accept)
    binding = bind(1, SamplingParams(temperature=0.0))
    states.bind([binding])
    step, logits = batch([1], [9]), torch.eye(32)[[4]]
    mask = TokenMask(np.array([0], np.int32), np.array([[1 << 6]], np.int32))
    made = sampler.sample(
        planned(states, step), step, StepStates(lambda: logits, likeliest=torch.tensor([7])), mask
    )
    assert made["token_ids"].tolist() == [6]


def test_of_equally_likely_tokens_the_first_are_reported_whatever_others_ask_for():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    logits[1], logits[2, 2:] = float("-inf"), float("-inf")
    logits[1, 7], logits[3] = 0.0, 1.0
    order = logits.argsort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 5, 20, 300):
        _, ids, top = logprobs(logits, order[:, 0], k)
        assert ids.tolist() == order[:, :k].tolist()
        assert torch.equal(top, logits.log_softmax(-1).gather(1, ids))


def test_no_likely_tokens_are_reported_where_none_are_asked_for():
    chosen, ids, top = logprobs(torch.zeros(2, 4), torch.tensor([1, 3]), 0)
    assert (chosen.shape, ids.shape, top.shape) == ((2,), (2, 0), (2, 0))
