"""Words that must not come, against a naive sampler: it generates one token after another, alone, and bans by hand
what would complete a word."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker import Constraint, Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.constraints import BannedState, Bans, fill_draft_masks
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.request.protocols import set_bits
from petiole.gpu_worker.text import load_tokenizer
from tests.support.toy_engine import BoldProposer
from tests.support.trials import rest

TOKENIZER = load_tokenizer(resolve_model("petiole-tiny"))
PROMPTS = ["Count from 1 to 9.", "Who are you?", "Tell a story."]


def tiny(**config: Any) -> Engine:
    config = {"num_pages": 4000, **config}  # not a row of the longest for each of 64: half a GB to clear
    settings = EngineConfig(model="petiole-tiny", device="cpu", dtype="float32", debug=True, **config)
    return Engine(settings, tokenizer=TOKENIZER, proposer=BoldProposer())


def ask(prompt: str, **options: Any) -> Request:
    fields = {key: options.pop(key) for key in list(options) if key in Request.__dataclass_fields__}
    sampling = SamplingParams(**{"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, **options})
    return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling, **fields)


def spelled(words: Sequence[str]) -> list[tuple[int, ...]]:
    texts = [before + word.lstrip(" ") for word in words for before in ("", " ")]
    return [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in texts if text]


def naive(engine: Engine, asked: Sequence[Request]) -> list[tuple[int, ...]]:
    """Each token is a request of its own, which bans what would complete a word."""
    outputs: list[tuple[int, ...]] = [()] * len(asked)
    for _ in range(asked[0].sampling.max_tokens):  # type: ignore[arg-type]
        steps = []
        for one, output in zip(asked, outputs, strict=True):
            sequences = spelled(one.sampling.bad_words)
            banned = [s[-1] for s in sequences if output[len(output) - len(s) + 1 :] == s[:-1] or len(s) == 1]
            sampling = replace(
                one.sampling, bad_words=(), banned_token_ids=banned, max_tokens=len(output) + 1, min_tokens=0
            )
            steps.append(replace(one, sampling=sampling, resume_token_ids=output))
        outputs = [result.token_ids for result in engine.generate(steps)]
    return outputs


def draw(seed: int, free: Sequence[tuple[int, ...]]) -> list[Request]:
    """Words that the outputs would have, of one to four tokens, and words that none has."""
    rng = random.Random(seed)

    def one(n: int) -> Request:
        output = free[n % len(free)]
        cuts = [(at, at + rng.choice((1, 2, 2, 2, 3, 4))) for at in rng.sample(range(len(output) - 4), 5)]
        said = [TOKENIZER.decode(output[begin:end]) for begin, end in cuts]
        words = [word for word in said if word.strip() and "�" not in word]
        return ask(
            PROMPTS[n % len(PROMPTS)],
            bad_words=[*words, "zebra", "  none such"],
            temperature=rng.choice((0.0, 0.8)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            seed=seed,
            request_id=f"{seed}.{n}",
        )

    return [one(n) for n in range(6)]


@pytest.mark.parametrize("seed", rest(range(6), short=2))
def test_no_word_comes_and_nothing_else_is_changed(seed: int) -> None:
    with tiny(pipeline="off") as engine:
        free = [result.token_ids for result in engine.generate([ask(prompt) for prompt in PROMPTS])]
        asked = draw(seed, free)
        expected = naive(engine, asked)
    drafts = (0, 4)[seed % 2]
    with tiny(pipeline="on", speculative_tokens=drafts, max_num_seqs=4, num_pages=60, chunk_size=8) as engine:
        results = engine.generate(asked)
        assert bool(engine.stats()["draft_tokens"]) == bool(drafts)
    assert [result.token_ids for result in results] == expected
    for one, tokens in zip(asked, expected, strict=True):
        for word in spelled(one.sampling.bad_words):
            assert all(tokens[at : at + len(word)] != word for at in range(len(tokens)))
    unbanned = [replace(one, sampling=replace(one.sampling, bad_words=())) for one in asked]
    with tiny() as engine:
        assert [result.token_ids for result in engine.generate(unbanned)] != expected, "some word is banned"


def test_a_resumed_output_goes_on_as_it_would_have() -> None:
    def asked(resumed: tuple[int, ...] = ()) -> Request:
        return ask(PROMPTS[0], bad_words=["3, 4", "5", "lov"], resume_token_ids=resumed)

    with tiny() as engine:
        whole = engine.generate([asked()])[0].token_ids
        for result in engine.generate([asked(whole[:n]) for n in (1, 7, 8, 20)]):
            assert result.token_ids == whole


def test_what_a_constraint_allows_is_banned_all_the_same() -> None:
    digits = Constraint("regex", "(12|13|14)(12|14)")
    with tiny() as engine:
        texts = {
            engine.generate([ask("x", bad_words=["12", "143"], constraint=digits, temperature=1.0, seed=seed)])[
                0
            ].text
            for seed in range(8)
        }
        assert texts <= {"1314", "1414"}
        nothing = ask("x", bad_words=["12", "13"], constraint=Constraint("regex", "12|13"))
        with pytest.raises(InvalidRequest, match="bad_words: must leave a token"):
            engine.generate([nothing])


def test_bad_words_are_refused_by_name() -> None:
    with tiny() as engine:
        for words, error in (
            ("word", "bad_words: must be a list, got"),
            (["a", ""], r"bad_words\[1\]: must not be empty"),
            (["\ud800"], r"bad_words\[0\]: must be valid Unicode"),
            ([f"{n} {'~' * 100}" for n in range(400)], "bad_words: must have at most 16384 tokens in all"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                engine.generate([ask("x", bad_words=words)])
        only = TOKENIZER.encode("7", add_special_tokens=False)
        with pytest.raises(InvalidRequest, match="allowed_token_ids: must leave a token that is not banned"):
            engine.generate([ask("x", bad_words=["7"], allowed_token_ids=only)])


@pytest.mark.parametrize("seed", range(20))
def test_a_place_is_free_exactly_if_no_tokens_before_it_could_ban_one(seed: int) -> None:
    rng = random.Random(seed)
    sequences = frozenset(tuple(rng.choices(range(3), k=rng.randint(2, 4))) for _ in range(rng.randint(1, 3)))
    bans = Bans(sequences, 3)
    output = rng.choices(range(3), k=rng.randint(0, 6))

    def could_ban(said: list[int], n: int) -> bool:
        if n == 0:
            return False
        ends = any(said[len(said) - len(s) + 1 :] == list(s[:-1]) and len(said) >= len(s) - 1 for s in sequences)
        return ends or any(could_ban([*said, token], n - 1) for token in range(3))

    for n in range(1, 5):
        assert BannedState(bans, None, output).is_free_for(n) == (not could_ban(output, n))


def test_many_long_words_that_begin_alike_cost_a_step_no_more_than_one() -> None:
    bans = Bans([(*([1] * n), 2 + n) for n in range(1, 250)], 1000)
    state = BannedState(bans, None, [1] * 100_000)
    mask = np.zeros(32, np.int32)
    began_at = time.process_time()
    for _ in range(1000):
        assert not state.is_free_for(1)
        assert state.consume(1)
    state.fill_mask(mask)
    assert time.process_time() - began_at < 1
    assert not np.unpackbits(mask.view(np.uint8), bitorder="little")[3:252].any()
    assert [state.fork().consume(token) for token in (2, 3, 251, 252)] == [True, False, False, True]
    state.rollback(1000)


class Paths:
    """A constraint: the output is one of these."""

    finished = False

    def __init__(self, *paths: tuple[int, ...]) -> None:
        self.paths, self.output = paths, list[int]()

    def next(self) -> set[int]:
        n = len(self.output)
        return {path[n] for path in self.paths if len(path) > n and list(path[:n]) == self.output}

    def fill_mask(self, out: Any) -> None:
        set_bits(out, sorted(self.next()))

    def consume(self, token_id: int) -> bool:
        allowed = token_id in self.next()
        self.output += [token_id] * allowed
        return allowed

    def rollback(self, n: int) -> None:
        del self.output[len(self.output) - n :]

    def fork(self) -> Any:
        raise AssertionError


def test_a_draft_after_which_nothing_may_come_fails_no_request() -> None:
    """It may be rejected: then the output goes on with 3."""
    state = BannedState(Bans([(1, 2)], 8), Paths((1, 2), (3, 4)))
    masks = np.zeros((3, 1), np.int32)
    assert fill_draft_masks(state, [1, 2], masks) == 1
    assert masks.tolist() == [[0b1010], [0], [0]]
    assert state.consume(1)
    with pytest.raises(InvalidRequest, match="must leave a token"):
        state.fill_mask(masks[0])
