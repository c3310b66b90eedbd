"""Train `petiole-tiny-vision` from nothing: `python -m training.vision.train --minutes 80`.

Every picture is new. The first part of the run teaches the tower alone to see: each position of a picture learns
to say which shape covers it, where that is and how many are left of it. With answers alone, it would take many
times as long. Then rows of questions come behind the pictures. Numbers that say where something is are learnt
from targets that a near miss matches in part, and from how far off the expected number is.

Products are bfloat16, weights float32. Time is the processor's, so that a pause does no harm. A checkpoint every
few minutes, and at SIGTERM, makes the run resumable: start the same command again.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.optimizer import Muon
from training.vision import tokens as tokens_
from training.vision.batches import Batch, Group, draw_batch
from training.vision.losses import off, seen
from training.vision.model import NUMBERS, Shape, SmallQwen

DEFAULT_CHECKPOINT = Path.home() / ".cache" / "petiole-training" / "vision" / "checkpoint.pt"
MATRIX_LR, OTHER_LR = 0.01, 0.0015
WARMUP_STEPS = 100
SEEING_SHARE, DECAY_SHARE = 0.2, 0.6
"""The first part of the run, in which the tower learns alone, and the last one, in which rates fall."""
NEAR_ENOUGH = 50
"""A number that says where something is counts as right within this distance, in the figures that are shown."""
QUESTION_SEED = 1_000_003


def features_of(model: SmallQwen, batch: Batch) -> list[Tensor]:
    """[N, positions, hidden] by picture: of the tower's last layer, and of the deep ones."""
    found: list[Tensor] = model.tower(batch.pixels)
    return found


def answers_of(model: SmallQwen, batch: Batch, features: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """See `SmallQwen.hidden`."""
    by_prefix = [one.unflatten(0, (-1, batch.each)).flatten(1, 2) for one in features]
    asked = [group.asked for group in batch.groups]
    return model.hidden(batch.prefix, batch.positions, batch.places, by_prefix, asked)


@torch.autocast("cpu", torch.bfloat16)
def losses(model: SmallQwen, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The parts of the loss, and for each group which tokens came out right, bool [M, L]."""
    features = features_of(model, batch)
    names = ("cells", *(f"deep{k}" for k in range(1, len(features))))
    parts = {
        name: seen(probe(one).float(), batch.covered)
        for name, probe, one in zip(names, model.probes, features, strict=True)
    }
    if not batch.groups:
        return parts, []
    hidden, table = answers_of(model, batch, features)
    text, places, right = [], [], []
    for group, states in zip(batch.groups, hidden, strict=True):
        targets, learnt, near = group.asked.tokens[:, 1:], group.learnt[:, 1:], group.near[:, 1:]
        logits = F.linear(states[:, :-1][learnt], table).float()
        wanted, at = targets[learnt], near[learnt]
        text.append(F.cross_entropy(logits[~at], wanted[~at], reduction="sum"))
        found = logits.argmax(-1)
        good = torch.where(at, (found - wanted).abs() <= NEAR_ENOUGH, found == wanted)
        right.append(torch.ones_like(group.learnt))
        right[-1][:, 1:][learnt] = good
        places.append((logits[at], wanted[at]))
    n_rows = sum(len(group.kinds) for group in batch.groups)
    parts["text"] = torch.stack(text).sum() / n_rows
    logits, wanted = (torch.cat(one) for one in zip(*places, strict=True))
    if len(wanted):
        of_numbers = logits[:, NUMBERS]
        parts["at"] = off(of_numbers[:, None], wanted[:, None] - NUMBERS.start)
        parts["digits"] = (logits.logsumexp(-1) - of_numbers.logsumexp(-1)).mean()
    return parts, right


@dataclass
class Progress:
    """What a checkpoint remembers beside weights and optimizers. asked: steps with questions. right: per kind of
    question, a running share."""

    step: int = 0
    asked: int = 0
    pictures: int = 0
    elapsed_s: float = 0.0
    right: dict[str, float] = field(default_factory=dict)

    def saw(self, group: Group, right: Tensor) -> None:
        for kind, whole in zip(group.kinds, right.all(1).tolist(), strict=True):
            before = self.right.get(kind, 0.0)
            self.right[kind] = before + (whole - before) * 0.01


def optimizers(model: SmallQwen) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers and mergers, AdamW for all else."""

    def inner(name: str, weight: Tensor) -> bool:
        return weight.ndim == 2 and any(part in name for part in ("layers.", "blocks.", "merger"))

    matrices = [w for name, w in model.named_parameters() if inner(name, w)]
    others = [w for name, w in model.named_parameters() if not inner(name, w)]
    adam = torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=MATRIX_LR), adam]


def step(
    model: SmallQwen, opts: list[torch.optim.Optimizer], batch: Batch, factor: float
) -> tuple[dict[str, float], list[Tensor]]:
    """As `losses`, and the weights have learnt from it."""
    parts, right = losses(model, batch)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)  # of the text, too, while the tower learns alone
    sum(parts.values(), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt, rate in zip(opts, (MATRIX_LR, OTHER_LR), strict=True):
        for group in opt.param_groups:
            group["lr"] = rate * factor
        with torch.autocast("cpu", torch.bfloat16):
            opt.step()
    return {name: float(part.detach()) for name, part in parts.items()}, right


def save(path: Path, model: SmallQwen, opts: list[torch.optim.Optimizer], progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    state: dict[str, Any] = {
        "shape": model.shape.as_dict(),
        "model": model.state_dict(),
        "optimizers": [opt.state_dict() for opt in opts],
        "progress": vars(progress),
    }
    torch.save(state, fresh)
    fresh.replace(path)


def load_model(path: Path) -> tuple[SmallQwen, dict[str, Any]]:
    """The model of a checkpoint and the whole state."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model = SmallQwen(Shape.of(state["shape"]))
    model.load_state_dict(state["model"])
    return model, state


def train(args: argparse.Namespace, stopped: threading.Event) -> None:
    """Until its time is up, or `stopped` is set."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    progress, state = Progress(), dict[str, Any]()
    if args.checkpoint.exists():
        model, state = load_model(args.checkpoint)
        progress = Progress(**state["progress"])
    else:
        model = SmallQwen(Shape())
    opts = optimizers(model)
    for opt, saved in zip(opts, state.get("optimizers", []), strict=False):
        opt.load_state_dict(saved)
    tokenizer = tokens_.build()
    rng = Random(args.seed * QUESTION_SEED + progress.step)
    budget_s, last_save, last_log = args.minutes * 60, time.monotonic(), time.monotonic()
    while progress.elapsed_s < budget_s and not stopped.is_set():
        began = time.process_time()
        share = progress.elapsed_s / budget_s
        asks = share >= SEEING_SHARE
        n = args.pictures if asks else 2 * args.pictures
        batch = draw_batch(tokenizer, rng, model.shape.tower, n, asks=asks)
        of_part = progress.asked if asks else progress.step
        factor = min(1.0, (of_part + 1) / WARMUP_STEPS) * min(1.0, (1 - share) / DECAY_SHARE)
        parts, right = step(model, opts, batch, max(0.0, factor))
        for group, own in zip(batch.groups, right, strict=True):
            progress.saw(group, own)
        now = time.monotonic()
        progress.step += 1
        progress.asked += asks
        progress.pictures += n
        progress.elapsed_s += time.process_time() - began
        if now - last_log > args.log_every_s:
            figures = " ".join(f"{k.replace(' ', '-')}={right:.2f}" for k, right in sorted(progress.right.items()))
            losing = " ".join(f"{name}={part:.2f}" for name, part in parts.items())
            print(
                f"{progress.elapsed_s / 60:.1f} min step {progress.step} {losing} "
                f"{progress.pictures} pictures lr x{factor:.2f} {figures}",
                flush=True,
            )
            last_log = now
        if now - last_save > args.save_every_s:
            save(args.checkpoint, model, opts, progress)
            last_save = now
    save(args.checkpoint, model, opts, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=80, help="processor time of the whole run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--pictures", type=int, default=16, help="in a step with questions")
    parser.add_argument("--save-every-s", type=float, default=120)
    parser.add_argument("--log-every-s", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    train(parser.parse_args(), stopped)


if __name__ == "__main__":
    main()
