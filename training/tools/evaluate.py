"""Measure `petiole-tiny-tools` and write its model card: `python -m training.tools.evaluate --card`.

Each kind of conversation is drawn with held-out cities and numbers. Every turn of the assistant counts, behind the
right turns before it; it is right to the letter, or wrong. The skills of petiole-tiny are asked as in
`training.evaluate`. The weights are computed in float32.
"""

import argparse
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training.decode import greedy, load_folder
from training.evaluate import SEED, accuracy
from training.model import Qwen3
from training.tools import card
from training.tools.conversations import DRAWS, draw
from training.tools.export import MODEL_FOLDER
from training.tools.template import pieces

LONGEST_TURN = 200


def turns(skill: str, count: int, seed: int = SEED) -> list[tuple[str, str]]:
    """The turns of `count` conversations: what is before each, and what the assistant says."""
    rng, found = Random(f"{skill} {seed}"), list[tuple[str, str]]()
    for _ in range(count):
        conversation, before = draw(skill, rng, "held-out"), ""
        for piece in pieces(conversation.tools, conversation.messages):
            if piece.learnt:
                found.append((before, piece.text))
            before += piece.text
    return found


def wrong(model: Qwen3, tokenizer: Tokenizer, asked: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The prompts that the model answers otherwise, with its answers."""
    prompts = [tokenizer.encode(before).ids for before, _ in asked]
    answers = greedy(model, prompts, LONGEST_TURN)
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in answers]
    pairs = zip(asked, texts, strict=True)
    return [(before, said) for (before, right), said in pairs if f"{said}<|im_end|>" != right]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--conversations", type=int, default=100, help="of each kind")
    parser.add_argument("--prompts", type=int, default=100, help="held-out questions a skill of petiole-tiny")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="write the figures into the folder's README.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_folder(args.folder)
    figures: dict[str, tuple[int, int]] = {}
    for skill in DRAWS:
        asked = turns(skill, args.conversations)
        failed = wrong(model, tokenizer, asked)
        figures[skill] = (len(asked) - len(failed), len(asked))
        print(f"{skill:16} {figures[skill][0]:4} of {len(asked):4}", flush=True)
        for before, said in failed[: args.show_wrong]:
            print(f"    {before!r}\n      said {said!r}")
    skills = accuracy(model, tokenizer, args.prompts)
    if args.card:
        (args.folder / "README.md").write_text(card.render(figures, skills))


if __name__ == "__main__":
    main()
