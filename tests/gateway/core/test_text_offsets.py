"""A token's log-probability is at the token's own text, whatever the tokens before it did with theirs: special
tokens that are hidden, spaces that decoders drop, characters of several tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from petiole.contract.results.outputs import TokenLogprobs
from petiole.gateway.core.parts import PositionedToken
from petiole.gateway.core.text_offsets import TokenOffsets
from petiole.gpu_worker.text import TextAssembler, Tokenizer, TokenTexts
from tests.gateway.core.test_streams import CUTS
from tests.support import tokenizers as samples

KINDS = {
    "byte_level": samples.byte_level,
    "sentencepiece": samples.sentencepiece,
    "metaspace": samples.metaspace,
    "word_piece": samples.word_piece,
}
PARTS = st.lists(st.text("helo wrdtf, né日😀\ngins", max_size=12), max_size=6)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def placed(
    made: Tokenizer, token_ids: Sequence[int], cuts: Sequence[int], skip: bool
) -> tuple[str, list[PositionedToken], list[PositionedToken]]:
    """A worker's deltas, cut behind these tokens, as the gateway places them: the text, each token at a place of
    the whole text, and the tokens behind the text."""
    assembler, spelling = (kind(made, skip_special_tokens=skip) for kind in (TextAssembler, TokenTexts))
    places, text, found = TokenOffsets(), "", list[PositionedToken]()
    for begin, end in pairwise([0, *sorted({cut for cut in cuts if cut < len(token_ids)}), len(token_ids)]):
        piece = assembler.push(token_ids[begin:end]).text
        piece += assembler.flush() if end == len(token_ids) else ""
        places.add([spelling.of(TokenLogprobs(token, -0.5, [])) for token in token_ids[begin:end]])
        if piece:
            found += [PositionedToken(len(text) + at, token, said) for at, token, said in places.emit(piece)]
        text += piece
    return text, found, places.rest(len(text))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=30)
@given(data=st.data(), parts=PARTS, cuts=CUTS, others=CUTS)
def test_each_token_is_at_its_own_text_or_nowhere(
    kind: str, skip: bool, data: st.DataObject, parts: list[str], cuts: list[int], others: list[int]
) -> None:
    made = tokenizer(kind)
    special = st.lists(st.sampled_from(sorted(made.special_token_ids)), max_size=2)
    ids = [
        token for part in parts for token in (*data.draw(special), *made.encode(part, add_special_tokens=False))
    ]
    text, found, rest = placed(made, ids, cuts, skip)
    assert [one.token.token_id for one in [*found, *rest]] == ids
    assert (text, found, rest) == placed(made, ids, others, skip)
    for at, token, said in found:
        assert 0 <= at < len(text)
        if skip and token.token_id in made.special_token_ids:
            assert not said
            continue
        spelled = token.texts[0] if token.texts else ""
        if "�" not in spelled:  # no part of a character
            assert spelled.strip() in text[at : at + len(spelled) + 1]
            assert said or not spelled.strip()


def test_a_worker_of_the_version_before_tells_no_lengths() -> None:
    spelled = [TokenLogprobs(k, -0.5, [], [text], [list(text.encode())]) for k, text in enumerate(("é", "b", "c"))]
    places = TokenOffsets()
    places.add(spelled)
    assert [(at, token.token_id) for at, token, _ in places.emit("éb")] == [(0, 0), (1, 1)]
    assert [token.token_id for _, token, _ in places.rest(3)] == [2]
