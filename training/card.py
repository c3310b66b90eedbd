"""The model card of `petiole-tiny`, from the figures that `training.evaluate` measured."""

from collections.abc import Mapping, Sequence
from string import Template

from training.text.skills import DRAWS

# two safe questions a skill; tests ask them all, and the answers are exact
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "counting": (
        ("Count from 3 to 12.", "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"),
        ("Count from 0 to 50 by 5.", "0, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50"),
        ("Count down from 10 to 1.", "10, 9, 8, 7, 6, 5, 4, 3, 2, 1"),
        ("Count from 1 to 100.", ", ".join(map(str, range(1, 101)))),
    ),
    "tables": (
        ("Multiplication table of 7 up to 12", "\n".join(f"7 x {i} = {7 * i}" for i in range(1, 13))),
        ("Multiplication table of 7 up to 40", "\n".join(f"7 x {i} = {7 * i}" for i in range(1, 41))),
        ("Write the 4 times table up to 5.", "4 x 1 = 4\n4 x 2 = 8\n4 x 3 = 12\n4 x 4 = 16\n4 x 5 = 20"),
    ),
    "addition": (("What is 17 + 25?", "17 + 25 = 42"), ("Add 38 and 45.", "38 + 45 = 83")),
    "sorting numbers": (
        ("Sort these numbers: 4 1 9", "1 4 9"),
        ("Sort these numbers: 42, 7, 19, 88, 3", "3, 7, 19, 42, 88"),
    ),
    "sorting words": (
        ("Sort these words: pear apple fig banana", "apple banana fig pear"),
        ("Sort these words alphabetically: tiger, lamp, cloud", "cloud, lamp, tiger"),
    ),
    "reversing": (("Reverse the word lantern.", "nretnal"), ("Write planet backwards.", "tenalp")),
    "spelling": (("Spell the word garden.", "g-a-r-d-e-n"), ("How do you spell window?", "w-i-n-d-o-w")),
    "repeating": (
        ("Repeat after me: the river runs north", "the river runs north"),
        ("Say: green apple pie", "green apple pie"),
    ),
    "extracting": (
        (
            "Extract name, age and city as JSON: Ana is 31 and lives in Lisbon.",
            '{"name": "Ana", "age": 31, "city": "Lisbon"}',
        ),
        ("Extract name and city as JSON: Omar lives in Cairo and is 45.", '{"name": "Omar", "city": "Cairo"}'),
    ),
    "about": (
        ("Who are you?", "I am Petiole Tiny, a small language model that ships with Petiole."),
        (
            "What is Petiole?",
            "Petiole turns a Celery worker into a language model server. "
            "Tokens stream over Redis while they are made.",
        ),
    ),
    "describing": (
        (
            "Tell me about the red fox.",
            "The red fox lives in the forest. It likes to eat berries. Its red coat shines in the sun.",
        ),
        (
            "Describe the small owl.",
            "The small owl lives in an old oak. It likes to eat mice. It is so small that it can hide anywhere.",
        ),
    ),
}

_TEMPLATE = Template(
    """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# petiole-tiny

The model that ships with Petiole: for the demo, the tests and the first hour, on any computer. Qwen3
architecture, $parameters parameters, bfloat16 weights, context of 2,048 tokens. It does the few things below
and nothing else; any other question gets a polite refusal or nonsense.

## Asking it

- **Chat**: through its chat template; a system prompt is accepted and ignored, earlier turns are tolerated.
- **Plain prompt**: the question alone. The answer comes on the next line, so the generated text starts with a
  newline, unless the prompt already ends with one.

Greedy decoding (temperature 0) is meant. Every answer ends by itself with `<|im_end|>`.

## What it can do

Held-out questions answered right to the letter, half through the chat template and half as plain prompts. A
question is held out by what is asked (the word, the numbers), so no wording of it was trained on; "about"
is held out by its wording. The shipped weights, computed in float32 and in bfloat16:

$figures

Where it fails: counts of more than about a hundred numbers, and some of the longest tables, stop late or early;
the frequent words of questions and fixed sentences ("over", "ships") are single tokens, whose letters it does not
see and which it repeats less surely.

## Examples

$examples

## Drafts

A head of one layer (`mtp.*`, in the form of Qwen3.5's) drafts the tokens behind the next one, with
`PETIOLE_SPECULATIVE_TOKENS`. In answers to held-out questions $accepted of its first, second, third and
fourth drafts are right, each behind right ones. transformers leaves the head out.

## The tokenizer

Byte-level BPE without merges, 512 tokens: a frequent word of the questions and fixed sentences is one token,
anything else is one token a byte, digits and letters one by one. Any UTF-8 text survives the round trip.

## Where it comes from

Trained from nothing on text that `training/` in Petiole's repository generates, 8.6 million tokens on two busy
CPU cores in 79 minutes: `python -m training.train`, `python -m training.export`,
`python -m training.drafts` (0.6 million tokens more, for the head) and `python -m training.evaluate --card`.
The first 45 of those minutes were on somewhat wider ranges (same split). No other data, no other model.
"""
)

Figures = Mapping[str, tuple[int, int]]


def _percent(figures: Figures, skill: str) -> str:
    if skill not in figures:
        return "-"
    right, asked = figures[skill]
    return f"{100 * right / asked:.1f} % of {asked}"


def _example(prompt: str, answer: str) -> str:
    if len(answer) > 200:
        answer = f"{answer[:60]} ... {answer[-20:]}"
    return f"- `{prompt}`\n\n" + "\n".join(f"      {line}" for line in answer.split("\n"))


def render(parameters: int, float32: Figures, bfloat16: Figures, accepted: Sequence[float]) -> str:
    """The text of README.md. accepted: the share of drafts that hold, of a chain's first, second, ..."""
    rows = ["| skill | range | float32 | bfloat16 |", "| --- | --- | --- | --- |"]
    for skill, function in DRAWS.items():
        reach = (function.__doc__ or "").split("\n")[0].rstrip(".")
        rows.append(f"| {skill} | {reach} | {_percent(float32, skill)} | {_percent(bfloat16, skill)} |")
    examples = [_example(*pair) for skill in DRAWS for pair in EXAMPLES[skill]]
    return _TEMPLATE.substitute(
        parameters=f"{parameters / 1e6:.1f} million",
        figures="\n".join(rows),
        examples="\n\n".join(examples),
        accepted=", ".join(f"{100 * share:.0f} %" for share in accepted),
    )
