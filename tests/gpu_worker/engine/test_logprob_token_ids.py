"""Log-probabilities of tokens that a request names, in place of the likeliest ones."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams

NAMED = [300, 7, 15]


def ask(**options: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **options})
    return Request(prompt="Count from 1 to 5.", sampling=sampling)


@pytest.mark.parametrize("drafts", [0, 4])
def test_the_named_tokens_have_their_log_probabilities_whatever_else_runs(drafts: int) -> None:
    with Engine(
        EngineConfig(
            model="petiole-tiny", device="cpu", dtype="float32", speculative_tokens=drafts, num_pages=4000
        )
    ) as engine:
        everything, named, likely, alone = engine.generate(
            [
                ask(logprobs=0, logprob_token_ids=range(128)),
                ask(logprobs=0, logprob_token_ids=NAMED, temperature=0.0),
                ask(logprobs=2),
                ask(),
            ]
        )
        rest = engine.generate([ask(logprobs=1, logprob_token_ids=range(at, at + 128)) for at in (128, 256, 384)])
    assert everything.token_ids == named.token_ids == likely.token_ids == alone.token_ids
    assert alone.logprobs is None
    for one, shown, top, *others in zip(
        everything.logprobs or (), named.logprobs or (), likely.logprobs or (),
        *(other.logprobs or () for other in rest), strict=True,
    ):  # fmt: skip
        table = dict(one.top) | dict(entry for other in others for entry in other.top)
        assert list(table) == list(range(512))
        assert [token for token, _ in shown.top] == NAMED
        assert [value for _, value in shown.top] == pytest.approx([table[token] for token in NAMED], abs=1e-4)
        assert one.logprob == pytest.approx(table[one.token_id], abs=1e-4)
        assert [token for token, _ in top.top] == sorted(table, key=table.__getitem__, reverse=True)[:2]


def test_they_are_refused_by_name() -> None:
    with Engine(EngineConfig(model="petiole-tiny", device="cpu", num_pages=4000)) as engine:
        for options, error in (
            ({"logprob_token_ids": [1]}, "logprob_token_ids: needs logprobs"),
            ({"logprobs": 0, "logprob_token_ids": [512]}, r"logprob_token_ids\[0\]"),
            ({"logprobs": 0, "logprob_token_ids": range(129)}, "logprob_token_ids: must have at most 128"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                engine.generate([ask(**options)])
