"""The text of an output: the same as decoding the whole, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, strategies as st

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.text import TextAssembler, Tokenizer
from petiole.gpu_worker.text.detokenizer import LibraryDetokenizer, PieceDetokenizer
from tests.support import tokenizers as samples

KINDS = {
    "byte_level": samples.byte_level,
    "sentencepiece": samples.sentencepiece,
    "metaspace": samples.metaspace,
    "word_piece": samples.word_piece,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


def in_pieces(
    assembler: TextAssembler, token_ids: Sequence[int], cuts: Sequence[int]
) -> tuple[list[str], str | None, int]:
    """Push in pieces of the lengths `cuts`, again and again: the texts, the stop, the tokens that count."""
    texts, counted, at, turn = [], 0, 0, 0
    while at < len(token_ids):
        size = cuts[turn % len(cuts)]
        piece = assembler.push(token_ids[at : at + size])
        texts.append(piece.text)
        counted += piece.n_tokens
        if piece.stop is not None:
            return texts, piece.stop, counted
        at, turn = at + size, turn + 1
    texts.append(assembler.flush())
    return texts, assembler.stop, counted


cuts = st.lists(st.integers(1, 7), min_size=1, max_size=8)
with_and_without_special_tokens = pytest.mark.parametrize("skip_special_tokens", [True, False])


def tokens_of(made: Tokenizer) -> st.SearchStrategy[int]:
    """Any token ids, special ones often."""
    return st.one_of(st.integers(0, made.vocab_size - 1), st.sampled_from(sorted(made.special_token_ids)))


@with_and_without_special_tokens
@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "word_piece"])
@given(data=st.data(), cuts=cuts)
def test_any_tokens_in_any_pieces_give_the_text_of_the_whole(
    kind: str, skip_special_tokens: bool, data: st.DataObject, cuts: list[int]
) -> None:
    made = tokenizer(kind)
    token_ids = data.draw(st.lists(tokens_of(made), max_size=60))
    assembler = TextAssembler(made, skip_special_tokens=skip_special_tokens)
    texts, _, counted = in_pieces(assembler, token_ids, cuts)
    assert "".join(texts) == made.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert counted == len(token_ids)


@with_and_without_special_tokens
@pytest.mark.parametrize("kind", sorted(KINDS))
@given(
    data=st.data(),
    parts=st.lists(st.text(st.sampled_from("helo wrdtf, né日😀\n\tgins"), max_size=20), max_size=4),
    cuts=cuts,
)
def test_encoded_text_in_any_pieces_gives_the_text_of_the_whole(
    kind: str, skip_special_tokens: bool, data: st.DataObject, parts: list[str], cuts: list[int]
) -> None:
    made = tokenizer(kind)
    special = st.sampled_from(sorted(made.special_token_ids))
    token_ids = [token for part in parts for token in (*made.encode(part), data.draw(special))]
    assembler = TextAssembler(made, skip_special_tokens=skip_special_tokens)
    texts, _, _ = in_pieces(assembler, token_ids, cuts)
    assert "".join(texts) == made.decode(token_ids, skip_special_tokens=skip_special_tokens)


@with_and_without_special_tokens
@given(data=st.data(), cuts=cuts)
def test_byte_fallback_keeps_what_it_has_shown_when_invalid_bytes_follow(
    skip_special_tokens: bool, data: st.DataObject, cuts: list[int]
) -> None:
    made = tokenizer("sentencepiece")
    token_ids = data.draw(st.lists(tokens_of(made), max_size=60))

    def streamed(cuts: list[int]) -> str:
        assembler = TextAssembler(made, skip_special_tokens=skip_special_tokens)
        return "".join(in_pieces(assembler, token_ids, cuts)[0])

    whole = made.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert streamed(cuts) == whole or "\ufffd" in whole
    assert streamed(cuts) == streamed([1])


@with_and_without_special_tokens
@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data(), cuts=cuts)
def test_behind_other_tokens_the_text_goes_on_as_in_the_whole(
    kind: str, skip_special_tokens: bool, data: st.DataObject, cuts: list[int]
) -> None:
    made = tokenizer(kind)
    whole_letters = tokens_of(made).filter(lambda v: "\ufffd" not in made.decode([v], skip_special_tokens=False))
    before = data.draw(st.lists(whole_letters, max_size=8))
    output = data.draw(st.lists(whole_letters, max_size=30))
    assembler = TextAssembler(made, skip_special_tokens=skip_special_tokens, before=before)
    text = "".join(in_pieces(assembler, output, cuts)[0])
    both, first = (made.decode(v, skip_special_tokens=skip_special_tokens) for v in (before + output, before))
    assert not both.startswith(first) or both == first + text


def test_the_usual_decoders_need_no_library_at_run_time() -> None:
    assert all(
        isinstance(tokenizer(kind).detokenizer(), PieceDetokenizer)
        for kind in ("byte_level", "sentencepiece", "metaspace")
    )
    assert isinstance(tokenizer("word_piece").detokenizer(), LibraryDetokenizer)


def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    made = tokenizer("sentencepiece")
    assembler = TextAssembler(made)
    smile = [made.backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    assert [assembler.push([token_id]).text for token_id in smile] == ["", "", "", "😀"]


def test_an_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    made = tokenizer("byte_level")
    assembler = TextAssembler(made)
    assert assembler.push([made.backend.token_to_id("ð")]).text == ""
    assert assembler.flush() == "\ufffd"


def test_special_tokens_yield_text_only_where_they_are_not_skipped() -> None:
    made = tokenizer("byte_level")
    token_ids = made.encode("<|im_start|><think>hello<|im_end|>")
    assert TextAssembler(made).push(token_ids).text == "<think>hello"
    shown = TextAssembler(made, skip_special_tokens=False).push(token_ids).text
    assert shown == "<|im_start|><think>hello<|im_end|>"


def test_a_special_token_ends_an_incomplete_character() -> None:
    made = tokenizer("byte_level")
    assembler = TextAssembler(made, skip_special_tokens=False)
    assert assembler.push([made.backend.token_to_id("ð")]).text == ""
    assert assembler.push([made.backend.token_to_id("<|im_end|>")]).text == "\ufffd<|im_end|>"


def test_ids_beyond_the_vocabulary_yield_no_text() -> None:
    made = tokenizer("byte_level")
    assert TextAssembler(made).push([made.vocab_size + 3, *made.encode("hello")]).text == "hello"


def test_llama_2_loses_one_leading_space_once() -> None:
    made = tokenizer("sentencepiece")
    hello = made.backend.token_to_id("▁hello")
    assembler = TextAssembler(made)
    assert [assembler.push([hello]).text, assembler.push([hello]).text] == ["hello", " hello"]


def test_behind_a_prompt_llama_2_keeps_its_space() -> None:
    made = tokenizer("sentencepiece")
    beginning, hello = made.backend.token_to_id("<s>"), made.backend.token_to_id("▁hello")
    assert TextAssembler(made, before=[beginning, hello]).push([hello]).text == " hello"
    assert TextAssembler(made, before=[beginning]).push([hello]).text == "hello"


# --- stop strings -----------------------------------------------------------------------------------------------


def letters(text: str) -> list[int]:
    """One token a byte."""
    made = tokenizer("byte_level")
    return [token_id for byte in text for token_id in made.encode(byte)]


def first_stop(
    text: str, stops: Sequence[str], settled: int = 0, *, include_stop: bool = False
) -> tuple[str, str | None]:
    """The model: grow the text by a letter until it ends with a stop string; the longest such counts. `settled`:
    in its first letters none ends."""
    for end in range(settled + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


stop_strings = st.lists(st.text(st.sampled_from("ab😀"), min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    text=st.text(st.sampled_from("ab😀c"), max_size=40), stops=stop_strings, cuts=cuts, include_stop=st.booleans()
)
def test_any_cut_gives_the_text_and_the_stop_of_the_model(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    made = tokenizer("byte_level")
    token_ids = letters(text)
    texts, stop, counted = in_pieces(TextAssembler(made, stops, include_stop=include_stop), token_ids, cuts)
    assert ("".join(texts), stop) == first_stop(text, stops, include_stop=include_stop)
    kept = made.decode(token_ids[:counted])
    assert kept == text if stop is None else kept == "".join(texts) + ("" if include_stop else stop)


@given(
    text=st.text(st.sampled_from("ab😀c"), max_size=40),
    stops=stop_strings,
    cuts=cuts,
    min_tokens=st.integers(0, 60),
)
def test_the_text_of_the_first_min_tokens_may_begin_a_stop_string_and_completes_none(
    text: str, stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    made, token_ids = tokenizer("byte_level"), letters(text)
    settled = made.decode(token_ids[:min_tokens]).rstrip("\ufffd")
    texts, stop, counted = in_pieces(TextAssembler(made, stops, min_tokens=min_tokens), token_ids, cuts)
    assert ("".join(texts), stop) == first_stop(text, stops, len(settled))
    assert stop is None or counted > min_tokens


@given(text=st.text(st.sampled_from("ab😀c"), max_size=40), stops=stop_strings)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    assembler, shown, seen = TextAssembler(tokenizer("byte_level"), stops), "", ""
    for letter in text:
        piece = assembler.push(letters(letter))
        shown, seen = shown + piece.text, seen + letter
        if piece.stop is not None:
            return
        held = seen[len(shown) :]
        begins = [seen[k:] for k in range(len(seen)) if any(stop.startswith(seen[k:]) for stop in stops)]
        assert held == max(begins, key=len, default="")


def test_the_text_is_cut_before_the_stop_string_and_the_token_that_completed_it_counts() -> None:
    made = tokenizer("byte_level")
    token_ids = made.encode("hello world, hello stream")
    piece = TextAssembler(made, ["world"]).push(token_ids)
    assert (piece.text, piece.stop) == ("hello ", "world")
    assert made.decode(token_ids[: piece.n_tokens]).startswith("hello world")
    assert "world" not in made.decode(token_ids[: piece.n_tokens - 1])


def test_a_stop_string_may_end_within_a_special_token_that_is_not_skipped() -> None:
    made = tokenizer("byte_level")
    token_ids = made.encode("hello<|im_end|>world")
    n_hello = len(made.encode("hello"))
    assembler = TextAssembler(made, ["lo<|im"], skip_special_tokens=False)
    assert assembler.push(token_ids) == ("hel", "lo<|im", n_hello + 1)
    assert TextAssembler(made, ["<|im"]).push(token_ids).stop is None


def test_nothing_counts_after_a_stop_string() -> None:
    made = tokenizer("byte_level")
    assembler = TextAssembler(made, ["world"])
    assembler.push(made.encode("hello world"))
    assert assembler.push(made.encode("more")) == ("", "world", 0)
    assert assembler.flush() == ""


def test_the_match_that_is_complete_first_wins() -> None:
    made = tokenizer("byte_level")
    assert TextAssembler(made, ["abc", "b"]).push(letters("abc"))[:2] == ("a", "b")
    assert TextAssembler(made, ["b", "ab"]).push(letters("abc"))[:2] == ("", "ab")


def test_an_incomplete_character_at_the_end_belongs_to_the_token_before_it() -> None:
    made = tokenizer("byte_level")
    for min_tokens, stop in ((0, "\ufffd"), (1, None)):
        assembler = TextAssembler(made, ["\ufffd"], min_tokens=min_tokens)
        assembler.push([made.backend.token_to_id("ð")])
        assert (assembler.flush(), assembler.stop) == ("" if stop else "\ufffd", stop)


def test_a_partial_match_is_shown_at_the_end() -> None:
    assembler = TextAssembler(tokenizer("byte_level"), ["END"])
    assert assembler.push(letters("the EN")).text == "the "
    assert assembler.flush() == "EN"


def test_an_empty_stop_string_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop\[1\]: must not be empty"):
        TextAssembler(tokenizer("byte_level"), ["a", ""])
