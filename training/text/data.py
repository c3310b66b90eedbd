"""Batches: rows of token ids whose answers carry the loss, grouped by length so that little is padding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.text import dialogue, skills
from training.text.tokenizer import END_OF_TEXT_ID

PLAIN_SHARE = 0.3
CONVERSATION_SHARE = 0.1
MAX_ROW_TOKENS = 1400


@dataclass(frozen=True)
class Row:
    """One training text; `answers` are the learnt intervals of token indices, each with its skill."""

    tokens: list[int]
    answers: list[tuple[str, int, int]]


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. `weights` float32 [rows, length - 1] is the loss weight of each next token."""

    tokens: Tensor
    weights: Tensor
    rows: list[Row]


def row_of(tokenizer: Tokenizer, pieces: Sequence[dialogue.Piece], names: Sequence[str]) -> Row:
    tokens: list[int] = []
    answers: list[tuple[str, int, int]] = []
    remaining = iter(names)
    for piece in pieces:
        ids = tokenizer.encode(piece.text).ids
        if piece.learnt:
            answers.append((next(remaining), len(tokens), len(tokens) + len(ids)))
        tokens += ids
    return Row(tokens, answers)


def draw_row(tokenizer: Tokenizer, rng: Random, shares: Mapping[str, float]) -> Row:
    """A plain prompt, a chat of one turn, or a conversation of two or three short ones."""
    names, weights = list(shares), list(shares.values())
    kind = rng.random()
    turns = rng.randint(2, 3) if kind < CONVERSATION_SHARE else 1
    examples = [skills.draw(name, rng, "train") for name in rng.choices(names, weights, k=turns)]
    if turns == 1 and kind < CONVERSATION_SHARE + PLAIN_SHARE:
        pieces = dialogue.plain(examples[0], newline_in_prompt=rng.random() < 0.2)
    else:
        pieces = dialogue.chat(examples, dialogue.any_system_prompt(rng))
    row = row_of(tokenizer, pieces, [example.skill for example in examples])
    return row if len(row.tokens) <= MAX_ROW_TOKENS else draw_row(tokenizer, rng, shares)


DrawRow = Callable[[Tokenizer, Random, Mapping[str, float]], Row]


def batch_of(rows: Sequence[Row]) -> Batch:
    """Rows side by side. An answer weighs sqrt(its length) in all, so that long ones do not drown short."""
    length = max(len(row.tokens) for row in rows)
    tokens = torch.full((len(rows), length), END_OF_TEXT_ID)
    weights = torch.zeros(len(rows), length - 1)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        for _, start, end in row.answers:
            weights[index, start - 1 : end - 1] = (end - start) ** -0.5
    return Batch(tokens, weights, list(rows))


def draw_batches(
    tokenizer: Tokenizer,
    rng: Random,
    shares: Mapping[str, float],
    step_tokens: int,
    batch_tokens: int,
    draw: DrawRow = draw_row,
) -> list[Batch]:
    """The batches of one optimizer step: about `step_tokens` tokens, at most about `batch_tokens` in each."""
    rows: list[Row] = []
    while sum(len(row.tokens) for row in rows) < step_tokens:
        rows.append(draw(tokenizer, rng, shares))
    rows.sort(key=lambda row: len(row.tokens))
    batches: list[list[Row]] = [[]]
    for row in rows:
        if batches[-1] and len(row.tokens) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return [batch_of(group) for group in batches]
