"""The tokenizer and the prompts of `petiole-tiny-vision`.

The first ten ids mean what they mean in Moondream 2 (0 begins and ends, 3 answers, 5 is a coordinate, 6 a size).
The 256 bytes follow, so that any text survives the round trip, then whole words.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from training.vision.pictures import COLORS, KINDS, Question, Shape

SPECIAL = ("eos", "task", "about", "answer", "thinking", "coordinate", "size", "points", "unused", "points_end")
EOS, TASK, ABOUT, ANSWER, THINKING, COORDINATE, SIZE = range(7)
VOCAB_SIZE = 384
BINS = 1024

_TASKS = ("caption", "query", "detect", "point", "short", "normal", "long")
_SENTENCES = "How many are there What color is the Is there a no yes A picture of from left to right shape shapes"
_WORDS = _SENTENCES.split()


def _words() -> list[str]:
    nouns = [word for kind in (*KINDS, "shape") for word in (kind, f"{kind}s")]
    plain = [*_TASKS, *_WORDS, *nouns, *COLORS]
    spaced = [f"Ġ{word}" for word in (*_WORDS, *nouns, *COLORS)]
    return list(dict.fromkeys(word for word in (*plain, *spaced) if len(word) > 1))


def build() -> Tokenizer:
    special = [f"<|{name}|>" for name in SPECIAL]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *_words()]
    pieces += [f"<|unused {k}|>" for k in range(VOCAB_SIZE - len(pieces))]
    assert len(pieces) == VOCAB_SIZE, f"{len(pieces)} tokens"
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


def templates(tokenizer: Tokenizer) -> dict[str, dict[str, list[int]]]:
    """As in Moondream's configuration."""
    task = {name: tokenizer.token_to_id(name) for name in _TASKS}
    around = {"suffix": [ANSWER]}
    return {
        "caption": {
            length: [TASK, task["caption"], ABOUT, task[length], ANSWER] for length in ("short", "normal", "long")
        },
        **{name: {"prefix": [TASK, task[name], ABOUT], **around} for name in ("query", "detect", "point")},
    }


@dataclass(frozen=True)
class Row:
    """Prompt and answer. bins: one pair a token, (-1, -1) for text; learnt from token `start` on."""

    tokens: list[int]
    bins: list[tuple[int, int]]
    start: int


def row_of(tokenizer: Tokenizer, question: Question) -> Row:
    known = templates(tokenizer)
    if question.skill == "caption":
        prompt = list(known["caption"][question.text])
    else:
        around = known[question.skill]
        space = "" if question.skill == "query" else " "
        prompt = [*around["prefix"], *tokenizer.encode(space + question.text).ids, *around["suffix"]]
        if question.skill == "query":
            prompt.append(ANSWER)
    answer = [(token, (-1, -1)) for token in tokenizer.encode(question.answer).ids]
    for shape in question.found:
        answer += [(COORDINATE, (coordinate_bin(at), -1)) for at in (shape.x, shape.y)]
        if question.skill == "detect":
            answer.append((SIZE, size_bins(shape)))
    answer.append((EOS, (-1, -1)))
    tokens, bins = zip(*answer, strict=True)
    return Row([*prompt, *tokens], [(-1, -1)] * len(prompt) + list(bins), len(prompt))


def coordinate_bin(value: float) -> int:
    return min(BINS - 1, round(value * BINS))


def size_bins(shape: Shape) -> tuple[int, int]:
    width, height = (_size_bin(value) for value in (shape.width, shape.height))
    return width, height


def _size_bin(value: float) -> int:
    from math import log2

    return min(BINS - 1, max(0, round((log2(value) + 10) / 10 * (BINS - 1))))
