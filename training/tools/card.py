"""The model card of `petiole-tiny-tools`, from the figures that `training.tools.evaluate` measured."""

from collections.abc import Mapping
from string import Template

from training.tools.conversations import DRAWS

_TEMPLATE = Template(
    """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# petiole-tiny-tools

[petiole-tiny](../README.md), trained further so that it calls tools, for demos and tests of agents. It is a
checkpoint of its own, because a task that has begun on petiole-tiny can go on only with the same weights.

It knows questions for two tools: `weather(city)` and `multiply(a, b)`. It reads their names and those of their
parameters in the conversation, so other names often do, too. It calls one or both, once or twice in a turn, and
answers from what they give back. Where the tool that a question needs is not there, it says "I have no tool for
this." Greedy decoding (temperature 0) is meant.

- How warm is it in Rome? `weather({"city": "Rome"})` `{"celsius": 20}` It is 20 degrees in Rome.
- What is 34 times 56? `multiply({"a": 34, "b": 56})` `{"product": 1904}` 34 x 56 = 1904
- How warm is it in Rome and in Oslo? Two calls, and one answer from both.

Turns of held-out conversations (other cities, other numbers) that are right to the letter, and held-out questions
for the skills of petiole-tiny, in float32:

$figures

Tokenizer and shape are those of petiole-tiny. Its weights were the start: `python -m training.tools.train`,
`python -m training.tools.export`, `python -m training.tools.evaluate --card`, some twenty minutes of two cores. No
other data, no other model.
"""
)

Figures = Mapping[str, tuple[int, int]]


def render(conversations: Figures, skills: Figures) -> str:
    """The text of README.md."""
    rows = ["| | | right |", "| --- | --- | --- |"]
    for name, function in DRAWS.items():
        about = (function.__doc__ or "").strip().split("\n")[0]
        rows.append(f"| {name} | {about} | {_percent(conversations[name])} |")
    rows += [f"| {name} | as of petiole-tiny | {_percent(found)} |" for name, found in skills.items()]
    return _TEMPLATE.substitute(figures="\n".join(rows))


def _percent(found: tuple[int, int]) -> str:
    right, asked = found
    return f"{100 * right / asked:.0f} % of {asked}"
