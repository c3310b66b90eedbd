"""Train `petiole-tiny-embed` from nothing: `python -m training.embed.train`. Writes the model folder.

A batch has pairs of all kinds. Each text of a pair is to be nearer to its other half than to all others of the
batch (InfoNCE), with all of its numbers and with the first of them alone, so that vectors can be cut
(Matryoshka). Sentences that share some of what they say are to have that cosine.

The words are learnt first, without the layers, at a hundredth of the cost. The layers begin as if they were not
there: what they add is zero.
"""

import argparse
import json
import math
import time
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from training.embed import tokenizer as words
from training.embed.pairs import DRAWS, Graded, Pair, draw, graded
from training.export import MODEL_FOLDER as TINY

MODEL_FOLDER = TINY / "embed"
PROMPTS = {"query": "query: ", "passage": "passage: "}
SIZES = (128, 64, 32)
TEMPERATURE = 0.05
PAIRS, GRADED = 96, 24
SHARES = {"help": 3.0, "people": 1.5, "places": 1.5, "rewording": 1.0, "topics": 1.0, "words": 1.0}
WORDS_LEARNING_RATE, LEARNING_RATE = 1e-2, 1.5e-3
TOGETHER = 48
"""Texts of like length that are computed together."""
BARE = 0.4
"""The share of texts without their prompt."""


def shape(vocab_size: int) -> BertConfig:
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=words.MAX_TOKENS,
        type_vocab_size=1,
        hidden_dropout_prob=0.05,
        attention_probs_dropout_prob=0.0,
        pad_token_id=words.PAD,
    )


def new_model(tokenizer: Tokenizer) -> BertModel:
    model = BertModel(shape(tokenizer.get_vocab_size()), add_pooling_layer=False)
    for layer in model.encoder.layer:
        nn.init.zeros_(layer.attention.output.dense.weight)
        nn.init.zeros_(layer.output.dense.weight)
    return model


def embedded(
    model: BertModel, tokenizer: Tokenizer, texts: list[str], *, shift: Random | None = None, layers: bool = True
) -> Tensor:
    """float32 [texts, hidden]: the means, not normalised. shift: texts begin at any position, so that all of them
    are trained."""
    found = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    found = [ids if len(ids) <= words.MAX_TOKENS else [*ids[: words.MAX_TOKENS - 1], words.SEP] for ids in found]
    order = sorted(range(len(found)), key=lambda k: len(found[k]))
    parts = [order[at : at + TOGETHER] for at in range(0, len(order), TOGETHER)]
    means = torch.cat([_means(model, [found[k] for k in part], shift, layers) for part in parts])
    return means[torch.tensor(order).argsort()]


def _means(model: BertModel, found: list[list[int]], shift: Random | None, layers: bool) -> Tensor:
    longest = max(map(len, found))
    ids = torch.tensor([one + [words.PAD] * (longest - len(one)) for one in found])
    mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in found])
    first = shift.randrange(words.MAX_TOKENS - longest + 1) if shift and shift.random() < 0.5 else 0
    positions = torch.arange(first, first + longest).unsqueeze(0)
    if layers:
        hidden = model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    else:
        hidden = model.embeddings(input_ids=ids, position_ids=positions)
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def loss_of_pairs(one: Tensor, two: Tensor, about: list[str]) -> Tensor:
    """Texts about the same are no negatives of each other."""
    numbers = {text: k for k, text in enumerate(about)}
    group = torch.tensor([numbers[text] for text in about])
    same = (group.unsqueeze(0) == group.unsqueeze(1)).fill_diagonal_(False)
    right, total = torch.arange(len(about)), one.new_zeros(())
    for size in SIZES:
        a, b = (functional.normalize(vectors[:, :size], dim=-1) for vectors in (one, two))
        scores = (a @ b.T / TEMPERATURE).masked_fill(same, -1e4)
        total = total + functional.cross_entropy(scores, right) + functional.cross_entropy(scores.T, right)
    return total / (2 * len(SIZES))


def loss_of_graded(one: Tensor, two: Tensor, shares: list[float]) -> Tensor:
    return functional.mse_loss(functional.cosine_similarity(one, two), torch.tensor(shares))


def prompted(rng: Random, pair: Pair) -> tuple[str, str]:
    first, second = ("query", "passage") if pair.asked else rng.choice((("query",) * 2, ("passage",) * 2))
    one, two = (
        text if rng.random() < BARE else PROMPTS[name] + text
        for name, text in ((first, pair.one), (second, pair.two))
    )
    return one, two


def drawn(rng: Random) -> tuple[list[Pair], list[Graded]]:
    names = rng.choices(list(DRAWS), [SHARES[name] for name in DRAWS], k=PAIRS)
    return [draw(name, rng, "train") for name in names], [graded(rng, "train") for _ in range(GRADED)]


def rate(done: float) -> float:
    """The share of the learning rate at a share of the time."""
    return min(1.0, done / 0.04) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(model: BertModel, tokenizer: Tokenizer, minutes: float, seed: int, *, layers: bool) -> int:
    """Returns the number of steps."""
    rng, began, step = Random(f"{seed} {layers}"), time.process_time(), 0
    highest = LEARNING_RATE if layers else WORDS_LEARNING_RATE
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    model.train()
    while (done := (time.process_time() - began) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = highest * rate(done)
        pairs, alike = drawn(rng)
        texts = [prompted(rng, pair) for pair in pairs]
        one = embedded(
            model, tokenizer, [*(text for text, _ in texts), *(g.one for g in alike)], shift=rng, layers=layers
        )
        two = embedded(
            model, tokenizer, [*(text for _, text in texts), *(g.two for g in alike)], shift=rng, layers=layers
        )
        contrast = loss_of_pairs(one[:PAIRS], two[:PAIRS], [pair.about for pair in pairs])
        grades = loss_of_graded(one[PAIRS:], two[PAIRS:], [g.share for g in alike])
        optimizer.zero_grad()
        (contrast + 2 * grades).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{done:5.2f} step {step}: {contrast.item():.3f} {grades.item():.3f}", flush=True)
        step += 1
    return step


def export(model: BertModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bfloat16, the configuration, the tokenizer, and the files of sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    words.save(tokenizer, folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (path, kind) in enumerate(modules)
    ]
    pooling = {"word_embedding_dimension": SIZES[0], "pooling_mode_mean_tokens": True}
    said = {"prompts": PROMPTS, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    sizes = {"max_seq_length": words.MAX_TOKENS, "do_lower_case": False}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in {
        "modules.json": listed,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": said,
        "sentence_bert_config.json": sizes,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=float, default=0.25, help="minutes of processor time for the words alone")
    parser.add_argument("--minutes", type=float, default=0.35, help="and then for all layers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = words.build()
    model = new_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters", flush=True)
    train(model, tokenizer, args.words, args.seed, layers=False)
    steps = train(model, tokenizer, args.minutes, args.seed, layers=True)
    export(model, tokenizer, args.folder)
    print(f"{steps} steps of {PAIRS} pairs; {args.folder}")


if __name__ == "__main__":
    main()
