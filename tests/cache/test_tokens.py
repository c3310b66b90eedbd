"""Cache tokens: identity of each kind, compact arrays, cuts that split no image."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from petiole.cache import (
    CacheTokens,
    CoordToken,
    ImageToken,
    MisalignedError,
    SizeToken,
    TextToken,
    TokenError,
    as_tokens,
)
from petiole.cache.tokens import boundary, page_boundary, reuse_limit

typed_tokens = st.one_of(
    st.builds(TextToken, st.integers(0, 2**40)),
    st.builds(CoordToken, st.floats(0, 1), st.integers(0, 1023)),
    st.builds(SizeToken, st.floats(0, 1), st.floats(0, 1), st.integers(0, 1023), st.integers(0, 1023)),
    st.builds(ImageToken, st.integers(0, 2**128 - 1), st.integers(1, 40)),
)


def codes(*tokens):
    return CacheTokens.from_tokens(tokens).codes.tolist()


def test_keys_ignore_what_is_only_for_the_embedding() -> None:
    assert CoordToken(0.25, 7).cache_key() == CoordToken(0.75, 7).cache_key() == (1, 7)
    assert SizeToken(0.1, 0.2, 3, 4).cache_key() == (2, 3, 4)
    assert TextToken(9).cache_key() == (0, 9)
    assert ImageToken(2**127, 729).cache_key() == (3, 2**127, 729)
    assert codes(CoordToken(0.25, 7)) == codes(CoordToken(0.75, 7))


@given(st.lists(typed_tokens, max_size=20))
def test_a_sequence_remembers_its_tokens(tokens) -> None:
    compact = CacheTokens.from_tokens(tokens)
    assert compact.cache_keys() == [token.cache_key() for token in tokens]
    assert len(compact) == len(tokens)
    assert compact.kv_length == sum(token.kv_length() for token in tokens)
    position = 0
    for i, token in enumerate(tokens):
        assert compact.token_index(position) == i
        position += token.kv_length()


@given(st.lists(typed_tokens, max_size=6), st.lists(typed_tokens, max_size=6))
def test_codes_are_equal_exactly_when_keys_are(one, two) -> None:
    first, second = CacheTokens.from_tokens(one), CacheTokens.from_tokens(two)
    assert (first.codes.tolist() == second.codes.tolist()) == (first.cache_keys() == second.cache_keys())


@given(st.lists(typed_tokens, min_size=1, max_size=12), st.integers(0, 500), st.sampled_from([1, 16]))
def test_cuts_are_the_largest_that_split_no_image(tokens, kv, page_size) -> None:
    compact = CacheTokens.from_tokens(tokens)
    ends = np.cumsum([0, *(token.kv_length() for token in tokens)]).tolist()
    interior = {p for start, end in pairwise(ends) for p in range(start + 1, end)}
    kv = min(kv, compact.kv_length)
    assert boundary(compact.codes, kv) == max(p for p in range(kv + 1) if p not in interior)
    whole = [p for p in range(0, kv + 1, page_size) if p not in interior]
    assert page_boundary(compact.codes, kv, page_size) == max(whole)
    limit = reuse_limit(compact.codes, page_size)
    assert limit <= compact.kv_length - tokens[-1].kv_length()


def test_tokens_can_be_appended_one_by_one() -> None:
    whole = [TextToken(1), ImageToken(5, 3), CoordToken(0.5, 2), 7, ImageToken(6, 2)]
    grown = CacheTokens()
    for token in whole:
        grown.append(token)
    assert grown.cache_keys() == CacheTokens.from_tokens(whole).cache_keys()
    grown.extend([1, 2])
    grown.extend(np.array([3]))
    assert grown.cache_keys()[-3:] == [(0, 1), (0, 2), (0, 3)]


def test_text_arrays_are_taken_without_a_copy_and_appending_does_not_write_into_them() -> None:
    ids = np.arange(10, dtype=np.int64)
    tokens = CacheTokens.from_text(ids)
    assert np.shares_memory(tokens.codes, ids)
    head = tokens.prefix(4)
    head.append(99)
    tokens.append(77)
    assert ids.tolist() == list(range(10))
    assert tokens.codes.tolist() == [*range(10), 77]
    assert as_tokens(tokens) is tokens
    assert as_tokens(np.arange(3, dtype=np.int32)).codes.tolist() == as_tokens([0, 1, 2]).codes.tolist()


def test_an_image_is_recognised_as_long_as_somebody_keeps_it() -> None:
    keeper = CacheTokens.from_tokens([ImageToken(42, 3)])
    assert codes(ImageToken(42, 3)) == keeper.codes.tolist()
    assert codes(ImageToken(42, 4)) != codes(ImageToken(42, 3))
    old = keeper.codes.tolist()
    del keeper
    gc.collect()
    assert codes(ImageToken(42, 3)) != old  # a serial is never used again


@pytest.mark.parametrize(
    "token",
    [
        -1,
        TextToken(-5),
        2**63,
        CoordToken(0.0, -1),
        SizeToken(0.0, 0.0, 0, 2**30),
        ImageToken(1, 0),
        ImageToken(1, 2**24),
    ],
)
def test_values_out_of_range_are_refused(token) -> None:
    with pytest.raises(TokenError, match="must be in"):
        CacheTokens.from_tokens([token])


def test_arrays_that_are_not_token_ids_are_refused() -> None:
    with pytest.raises(TokenError, match="got -3"):
        as_tokens(np.array([1, -3]))
    with pytest.raises(TokenError, match="float64"):
        as_tokens(np.array([1.0]))
    with pytest.raises(TokenError, match="flat"):
        as_tokens(np.zeros((2, 2), dtype=np.int64))


def test_a_prefix_may_not_split_an_image() -> None:
    tokens = CacheTokens.from_tokens([1, ImageToken(5, 3), 2])
    assert tokens.prefix(4).cache_keys() == [(0, 1), (3, 5, 3)]
    with pytest.raises(MisalignedError, match="inside an image"):
        tokens.prefix(2)
    with pytest.raises(MisalignedError):
        tokens.prefix(6)
