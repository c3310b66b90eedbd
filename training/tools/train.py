"""Train `petiole-tiny` further, so that it calls tools: `python -m training.tools.train --minutes 20`.

It begins with the weights of petiole-tiny's folder, and with half of their learning rates. The skills that it has
are only kept warm. The rest is as in `training.train`.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training.decode import load_folder
from training.export import MODEL_FOLDER
from training.text.data import MAX_ROW_TOKENS, Row, draw_row as draw_skill, row_of
from training.text.skills import DRAWS as SKILLS
from training.tools.conversations import DRAWS, draw, joined
from training.tools.template import pieces
from training.train import MATRIX_LR, OTHER_LR, Progress, arguments, go_on, load_model

DEFAULT_CHECKPOINT = Path(tempfile.gettempdir()) / "petiole-tiny-tools" / "checkpoint.pt"
SKILL_SHARE = 0.25
JOINED_SHARE = 0.2


def draw_row(tokenizer: Tokenizer, rng: Random, shares: Mapping[str, float]) -> Row:
    """A conversation with tools, or now and then a text of petiole-tiny's own training."""
    if rng.random() < SKILL_SHARE:
        return draw_skill(tokenizer, rng, {skill: shares[skill] for skill in SKILLS})
    name = rng.choices(list(DRAWS), [shares[skill] for skill in DRAWS])[0]
    conversation = draw(name, rng, "train")
    if rng.random() < JOINED_SHARE:
        conversation = joined(rng, conversation, "train")
    parts = pieces(conversation.tools, conversation.messages)
    row = row_of(tokenizer, parts, [conversation.skill] * len(parts))
    return row if len(row.tokens) <= MAX_ROW_TOKENS else draw_row(tokenizer, rng, shares)


def main() -> None:
    args = arguments(__doc__, 20, DEFAULT_CHECKPOINT)
    torch.manual_seed(args.seed)
    if args.checkpoint.exists():
        model, state = load_model(args.checkpoint)
    else:
        model, state = load_folder(MODEL_FOLDER)[0].train(), {}
    learnt = dict.fromkeys(SKILLS, 1.0) | dict.fromkeys(DRAWS, 0.0)
    progress = Progress(right=learnt, length=dict.fromkeys(learnt, 30.0))
    go_on(args, model, state, progress, (MATRIX_LR / 2, OTHER_LR / 2), draw_row)


if __name__ == "__main__":
    main()
