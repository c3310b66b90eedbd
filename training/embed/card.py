"""The model card of `petiole-tiny-embed`, from the figures that `training.embed.evaluate` measured."""

from collections.abc import Mapping
from string import Template

from training.embed.pairs import DRAWS

_TEMPLATE = Template(
    """---
license: apache-2.0
library_name: sentence-transformers
pipeline_tag: sentence-similarity
language: en
---

# petiole-tiny-embed

The model of vectors that ships with Petiole: for the demo, the tests and the first hour of a search, on any
computer. BERT's architecture, $parameters million parameters, bfloat16 weights, vectors of 128 numbers from the
mean of all tokens, texts of up to 256 tokens. Vectors may be cut to 64 or 32 numbers.

Prompts: `query` for what is searched for, `passage` for what is found; texts alone do without. It knows the
words of the text that it was trained on, about a thousand, and sees others as pieces. For a real index take a
real model.

Of $pairs held-out pairs of each kind, the second texts were searched with the first ones. What a pair is about
was never trained on: an action with its thing, a person, a place, words together. recall@1: how often the
nearest text is a right one. MRR: the mean of 1 / the place of the first right one. In float32:

$figures

Spearman's correlation of cosines with the share of what two sentences say that is the same, of $pairs held-out
pairs: $spearman.

Trained from nothing on text that `training/embed` in Petiole's repository generates, for 36 seconds of one CPU
core: `python -m training.embed.train`, `python -m training.embed.evaluate --card`. No other data, no other
model.
"""
)

Figures = Mapping[str, tuple[float, float]]


def render(parameters: int, pairs: int, whole: Figures, cut: Figures, spearman: float) -> str:
    """The text of README.md."""
    rows = ["| | | recall@1 | MRR | recall@1 of 32 numbers |", "| --- | --- | --- | --- | --- |"]
    for name, function in DRAWS.items():
        recall, mrr = whole[name]
        rows.append(f"| {name} | {function.__doc__} | {recall:.2f} | {mrr:.2f} | {cut[name][0]:.2f} |")
    return _TEMPLATE.substitute(
        parameters=f"{parameters / 1e6:.2f}", pairs=pairs, figures="\n".join(rows), spearman=f"{spearman:.2f}"
    )
