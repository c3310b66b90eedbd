"""Measure `petiole-tiny-embed` on held-out pairs, and write its card: `python -m training.embed.evaluate --card`.

Of each kind, the second texts of `--pairs` held-out pairs are searched with the first ones, with the prompts of
the model. A text about the same, or of the same topic, is right, too. recall@1: how often the nearest text is
right; MRR: the mean of 1 / the place of the first right one. Spearman: whether cosines of sentences are ordered
like the share of what they say that is the same. The weights are computed in float32.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import BertModel

from training.embed import card
from training.embed.pairs import DRAWS, Pair, draw, graded
from training.embed.train import MODEL_FOLDER, PROMPTS, SIZES, embedded

SEED = 20
Figures = dict[str, tuple[float, float]]
"""recall@1 and MRR, by kind of pair."""
Rows = npt.NDArray[np.float32]


def load(folder: Path) -> tuple[BertModel, Tokenizer]:
    model = BertModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False).eval()
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def vectors(model: BertModel, tokenizer: Tokenizer, texts: Sequence[str], size: int = SIZES[0]) -> Rows:
    """The vectors of the texts, of length 1."""
    with torch.inference_mode():
        found: Rows = functional.normalize(embedded(model, tokenizer, list(texts))[:, :size], dim=-1).numpy()
    return found


def held_out(name: str, count: int, seed: int = SEED) -> list[Pair]:
    rng = Random(f"{name} {seed}")
    return [draw(name, rng, "held-out") for _ in range(count)]


def figures(pairs: Sequence[Pair], ones: Rows, twos: Rows) -> tuple[float, float]:
    """recall@1 and MRR of a search for the second texts with the first ones."""
    scores, about = ones @ twos.T, np.array([pair.right for pair in pairs])
    order = np.argsort(-scores, axis=1)
    first = (about[order] == about[:, None]).argmax(1)
    return float((first == 0).mean()), float((1 / (1 + first)).mean())


def searched(model: BertModel, tokenizer: Tokenizer, count: int, size: int = SIZES[0]) -> Figures:
    found: Figures = {}
    for name in DRAWS:
        pairs = held_out(name, count)
        before = [(PROMPTS["query"], PROMPTS["passage"]) if pair.asked else ("", "") for pair in pairs]
        ones = [first + pair.one for (first, _), pair in zip(before, pairs, strict=True)]
        twos = [second + pair.two for (_, second), pair in zip(before, pairs, strict=True)]
        made = (vectors(model, tokenizer, texts, size) for texts in (ones, twos))
        found[name] = figures(pairs, *made)
    return found


def spearman(model: BertModel, tokenizer: Tokenizer, count: int, seed: int = SEED) -> float:
    rng = Random(seed)
    drawn = [graded(rng, "held-out") for _ in range(count)]
    ones, twos = (vectors(model, tokenizer, texts) for texts in zip(*((g.one, g.two) for g in drawn), strict=True))
    return float(np.corrcoef(ranks((ones * twos).sum(1)), ranks(np.array([g.share for g in drawn])))[0, 1])


def ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Equal values have the mean of their ranks."""
    _, groups, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: npt.NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[groups]
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--pairs", type=int, default=200, help="held-out pairs of each kind")
    parser.add_argument("--card", action="store_true", help="write the figures into the folder's README.md")
    args = parser.parse_args()
    model, tokenizer = load(args.folder)
    whole, cut = (searched(model, tokenizer, args.pairs, size) for size in (SIZES[0], SIZES[-1]))
    correlation = spearman(model, tokenizer, args.pairs)
    parameters = sum(weight.numel() for weight in model.parameters())
    text = card.render(parameters, args.pairs, whole, cut, correlation)
    if args.card:
        (args.folder / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
