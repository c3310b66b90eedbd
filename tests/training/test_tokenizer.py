"""The tokenizer: nothing is lost, letters and digits stand alone, and training cuts text as users will."""

from random import Random

from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from training.export import MODEL_FOLDER
from training.text import dialogue, words
from training.text.data import row_of
from training.text.skills import DRAWS, draw
from training.text.tokenizer import END_OF_TEXT_ID, IM_END_ID, IM_START_ID, VOCAB_SIZE, build

TOKENIZER = build()


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.text(alphabet='\t\n\r  ,.x=+0129é漢🌱"{}:abc', max_size=60))
def test_white_space_digits_and_punctuation_survive_too(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_last_ids() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert [TOKENIZER.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [
        END_OF_TEXT_ID,
        IM_START_ID,
        IM_END_ID,
    ]


def test_a_content_word_is_its_letters_and_a_number_its_digits() -> None:
    for word in words.WORDS:
        assert TOKENIZER.encode(word).tokens == list(word)
        assert TOKENIZER.encode(f"Spell {word}").tokens[2:] == list(word)
    assert TOKENIZER.encode("2048").tokens == list("2048")


def test_the_shipped_tokenizer_is_the_one_that_the_script_builds() -> None:
    shipped = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    assert shipped.to_str() == TOKENIZER.to_str()


def test_training_text_is_cut_as_the_whole_text_is() -> None:
    """Pieces are tokenized one by one in training; a served prompt is tokenized whole. Both must agree."""
    rng = Random(3)
    for skill in DRAWS:
        for _ in range(30):
            example = draw(skill, rng, "train")
            for pieces in (
                dialogue.plain(example),
                dialogue.plain(example, newline_in_prompt=True),
                dialogue.chat([example, example], system="Be brief."),
            ):
                row = row_of(TOKENIZER, pieces, [skill] * 2)
                assert row.tokens == TOKENIZER.encode("".join(piece.text for piece in pieces)).ids


def test_every_learnt_answer_ends_in_the_end_token() -> None:
    example = draw("addition", Random(4), "train")
    for pieces in (dialogue.plain(example), dialogue.chat([example])):
        row = row_of(TOKENIZER, pieces, ["addition"])
        (_, start, end), *_ = row.answers
        assert row.tokens[end - 1] == IM_END_ID
        assert IM_END_ID not in row.tokens[start : end - 1]
