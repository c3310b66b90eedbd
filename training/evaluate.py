"""Measure the model folder on held-out questions and write its model card: `python -m training.evaluate`.

Every skill is asked `--prompts` held-out questions, drawn as in training, half through the chat template and
half as plain prompts; an answer counts if it is right to the letter and ends by itself. Twice: with the shipped
bfloat16 weights widened to float32 (as on a CPU), and with bfloat16 arithmetic (as on a GPU). Of the head that
drafts it is measured how many of its drafts of those answers hold.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from training import card, drafts
from training.decode import greedy, load_folder
from training.export import MODEL_FOLDER
from training.model import Qwen3
from training.text import dialogue
from training.text.skills import DRAWS, Example, draw
from training.text.tokenizer import IM_END_ID

SEED = 20
LONGEST_DRAFTED, CHAIN = 300, 4


@dataclass(frozen=True)
class Question:
    """An example in one of the two forms of prompt."""

    example: Example
    plain: bool

    @property
    def text(self) -> str:
        return self.example.prompt if self.plain else dialogue.chat_prefix([("user", self.example.prompt)])

    def accepts(self, text: str) -> bool:
        """Whether the generated `text` is right; a plain prompt is answered on the next line."""
        return self.example.accepts(text.removeprefix("\n") if self.plain else text)


def held_out(skill: str, count: int, seed: int = SEED) -> list[Question]:
    """`count` different held-out questions of `skill`, every second one as a plain prompt."""
    rng = Random(f"{skill} {seed}")
    found: dict[str, Example] = {}
    tries = 0
    while len(found) < count and tries < 50 * count:
        example = draw(skill, rng, "held-out")
        found.setdefault(example.prompt, example)
        tries += 1
    return [Question(example, index % 2 == 1) for index, example in enumerate(found.values())]


def answers(model: Qwen3, tokenizer: Tokenizer, questions: list[Question], batch: int = 64) -> list[str]:
    """The model's greedy answers; one that does not end by itself comes back with a mark at its end."""
    room = 8 + max(len(tokenizer.encode(question.example.answer).ids) for question in questions)
    by_length = sorted(range(len(questions)), key=lambda index: len(questions[index].example.answer))
    texts = [""] * len(questions)
    for start in range(0, len(by_length), batch):
        indices = by_length[start : start + batch]
        prompts = [tokenizer.encode(questions[index].text).ids for index in indices]
        for index, ids in zip(indices, greedy(model, prompts, room), strict=True):
            texts[index] = tokenizer.decode(ids, skip_special_tokens=False) + ("…" if len(ids) == room else "")
    return texts


def accuracy(model: Qwen3, tokenizer: Tokenizer, count: int, show_wrong: int = 0) -> dict[str, tuple[int, int]]:
    """For each skill: right answers and questions."""
    figures: dict[str, tuple[int, int]] = {}
    for skill in DRAWS:
        questions = held_out(skill, count)
        texts = answers(model, tokenizer, questions)
        wrong = [(q, text) for q, text in zip(questions, texts, strict=True) if not q.accepts(text)]
        figures[skill] = (len(questions) - len(wrong), len(questions))
        print(f"{skill:16} {figures[skill][0]:4} of {len(questions):4}", flush=True)
        for question, text in wrong[:show_wrong]:
            print(f"    {question.text!r}\n      said  {text!r}\n      right {question.example.answer!r}")
    return figures


def accepted_drafts(folder: Path, count: int) -> list[float]:
    """Which share of a chain's first, second, ... drafts holds in the greedy answers to `count` held-out questions
    of each skill."""
    model, tokenizer = load_folder(folder)
    questions = [question for skill in DRAWS for question in held_out(skill, count)]
    prompts = [tokenizer.encode(question.text).ids for question in questions]
    said = [[*answer, IM_END_ID] for answer in greedy(model, prompts, LONGEST_DRAFTED)]
    return drafts.accepted(model, drafts.load_head(folder), list(zip(prompts, said, strict=True)), CHAIN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--prompts", type=int, default=300, help="held-out questions a skill")
    parser.add_argument("--bfloat16-prompts", type=int, default=100, help="the same in bfloat16; 0 to skip")
    parser.add_argument(
        "--drafted-prompts", type=int, default=20, help="held-out questions a skill that are drafted"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", type=int, default=0)
    parser.add_argument("--card", action="store_true", help="write the figures into the folder's README.md")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wide = accuracy(*load_folder(args.folder), args.prompts, args.show_wrong)
    narrow: dict[str, tuple[int, int]] = {}
    if args.bfloat16_prompts:
        print("bfloat16 arithmetic")
        narrow = accuracy(*load_folder(args.folder, torch.bfloat16), args.bfloat16_prompts)
    if args.card:
        parameters = sum(weight.numel() for weight in load_folder(args.folder)[0].parameters())
        held = accepted_drafts(args.folder, args.drafted_prompts)
        (args.folder / "README.md").write_text(card.render(parameters, wide, narrow, held))


if __name__ == "__main__":
    main()
