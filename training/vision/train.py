"""Train `petiole-tiny-vision` from nothing: `python -m training.vision.train --minutes 240`.

Every picture is new. A step takes some pictures of one tiling, with one row of questions each. Bins are learnt
from targets that a near miss matches in part, and from how far off the expected bin is. Beside the answers, each
position of the picture learns to say which shape covers it, where that is and how many are left of it: with
answers alone, the encoder would take many times as long to see anything. It says so twice, behind the encoder and
halfway through the text decoder; neither head is exported.

Products are bfloat16, weights float32. Time is the processor's, so that a pause does no harm. A checkpoint every
few minutes, and at SIGTERM, makes the run resumable: start the same command again. `--from` starts a new run with
the weights of a model folder.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from petiole.gpu_worker.models.moondream.crops import CropGeometry, Tiling, cropped
from training.optimizer import Muon
from training.vision import tokens as tokens_
from training.vision.losses import Covered, off, seen
from training.vision.model import Moondream, Shape
from training.vision.pictures import Scene, ask_all, ask_count, draw_scene, paint
from training.vision.tokens import COORDINATE, EOS, SIZE, Row, row_of

DEFAULT_CHECKPOINT = Path(tempfile.gettempdir()) / "petiole-tiny-vision" / "checkpoint.pt"
MATRIX_LR, OTHER_LR = 0.01, 0.0015
WARMUP_STEPS = 100
DECAY_SHARE = 0.7
LARGE_SHARE = 0.15
"""The share of steps with pictures that are cut into several crops."""
SKIPPED = {"color": 0.6, "yes or no": 0.5}
"""The share of questions that are left out, of the kinds that are learnt soonest."""
QUESTION_SEED = 1_000_003


@dataclass(frozen=True)
class Batch:
    """crops: uint8 [N, crops, size, size, 3]; tokens, positions, question: int64 [N, T]; question is 0 at padding;
    bins: int64 [N, T, 2]; learnt: bool [N, T], the tokens to predict; kinds: per row, each question's kind.
    covered: what covers the pictures."""

    crops: Tensor
    tiling: Tiling
    tokens: Tensor
    positions: Tensor
    question: Tensor
    bins: Tensor
    learnt: Tensor
    kinds: list[list[str]]
    covered: Covered


def picture_size(rng: Random, geometry: CropGeometry, large: bool) -> tuple[int, int]:
    small, step = geometry.size, geometry.window
    if not large:
        return rng.randint(small * 3 // 4, small * 3 // 2), rng.randint(small * 3 // 4, small)
    sides = small + step, small + step
    return sides[0] + rng.randint(-step // 2, step), sides[1] + rng.randint(-step // 2, step)


def geometry_of(shape: Shape) -> CropGeometry:
    v = shape.vision
    return CropGeometry(v.patch, v.grid, v.margin, v.max_crops)


def draw_batch(tokenizer: Tokenizer, rng: Random, shape: Shape, n: int) -> Batch:
    """A batch of even seeds: the odd ones are held out. Of two scenes the batch has the one with more shapes,
    which teaches more."""
    geometry = geometry_of(shape)
    size = picture_size(rng, geometry, rng.random() < LARGE_SHARE)
    crops, rows, kinds = [], list[list[Row]](), list[list[str]]()
    scenes = list[Scene]()
    for _ in range(n):
        own = Random(2 * rng.getrandbits(60))
        scene = max((draw_scene(own, size) for _ in range(2)), key=lambda scene: len(scene.shapes))
        found = cropped(paint(scene, own), geometry)
        questions = [
            q for q in (*ask_all(scene, own), ask_count(scene, own)) if own.random() > SKIPPED.get(q.kind, 0)
        ]
        crops.append(torch.from_numpy(found.pixels))
        rows.append([row_of(tokenizer, question) for question in questions])
        kinds.append([question.kind for question in questions])
        scenes.append(scene)
    batch = batch_of(torch.stack(crops), found.tiling, rows, kinds, 1 + shape.vision.grid**2)
    return replace(batch, covered=Covered.of(scenes, shape.vision.grid, shape.vision.grid))


def batch_of(crops: Tensor, tiling: Tiling, rows: list[list[Row]], kinds: list[list[str]], prefix: int) -> Batch:
    length = max(sum(len(row.tokens) for row in line) for line in rows)
    tokens, positions, question = (torch.zeros(len(rows), length, dtype=torch.int64) for _ in range(3))
    bins = torch.full((len(rows), length, 2), -1)
    learnt = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, line in enumerate(rows):
        at = 0
        for k, row in enumerate(line, 1):
            span = slice(at, at + len(row.tokens))
            tokens[i, span], bins[i, span] = torch.tensor(row.tokens), torch.tensor(row.bins)
            positions[i, span], question[i, span] = torch.arange(prefix, prefix + len(row.tokens)), k
            learnt[i, at + row.start : span.stop] = True
            at = span.stop
    return Batch(crops, tiling, tokens, positions, question, bins, learnt, kinds, Covered.of([], 0, 0))


def hidden_of(model: Moondream, batch: Batch, images: Tensor) -> tuple[Tensor, Tensor]:
    """[N, grid², dim] of the pictures halfway, and [N, T, dim] of the questions, each as if alone behind its
    picture."""
    n, prefix = len(images), images.shape[1] + 1
    begin = torch.full((n, 1), EOS)
    none = torch.full((n, 1, 2), -1)
    x = torch.cat([model.embedded(begin, none), images, model.embedded(batch.tokens, batch.bins)], dim=1)
    positions = torch.cat([torch.arange(prefix).expand(n, -1), batch.positions], dim=1)
    owner = torch.cat([torch.zeros(n, prefix, dtype=torch.int64), batch.question], dim=1)
    order = torch.arange(owner.shape[1])
    picture = order < prefix
    same = (owner[:, :, None] == owner[:, None, :]) & (order[:, None] >= order[None, :])
    mask = picture[None, None, :] | (same & ~picture[None, :, None])
    halfway, hidden = model.hidden(x, positions, mask[:, None])
    return halfway[:, 1:prefix], hidden[:, prefix:]


@torch.autocast("cpu", torch.bfloat16)
def losses(model: Moondream, batch: Batch) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The parts of the loss; for each learnt token whether it came out right, and by how many bins it missed."""
    images = model.images(batch.crops, batch.tiling)
    halfway, hidden = hidden_of(model, batch, images)
    targets = batch.learnt[:, 1:]
    before, tokens, bins = hidden[:, :-1][targets], batch.tokens[:, 1:][targets], batch.bins[:, 1:][targets]
    logits = model.logits(before).float()
    parts = {"text": 2 * F.cross_entropy(logits, tokens, label_smoothing=0.01)}
    parts["cells"] = seen(model.cells(images).float(), batch.covered)
    parts["places"] = seen(model.places(halfway).float(), batch.covered)
    missed = torch.zeros(len(tokens))
    for name, token, decode in (("at", COORDINATE, model.coordinate_logits), ("size", SIZE, model.size_logits)):
        chosen = tokens == token
        if chosen.any():
            found = decode(before[chosen]).float().view(int(chosen.sum()), -1, model.shape.region.bins)
            wanted = bins[chosen][:, : found.shape[1]]
            parts[name] = off(found, wanted)
            missed[chosen] = (found.argmax(-1) - wanted).abs().amax(-1).float()
    return parts, logits.argmax(-1) == tokens, missed


@dataclass
class Progress:
    """What a checkpoint remembers beside weights and optimizers. right: per kind of question, a running share."""

    step: int = 0
    pictures: int = 0
    elapsed_s: float = 0.0
    right: dict[str, float] = field(default_factory=dict)

    def saw(self, batch: Batch, right: Tensor, missed: Tensor) -> None:
        where = batch.learnt[:, 1:].nonzero()
        good = right & (missed <= 0.05 * tokens_.BINS)
        key = where[:, 0] * 100 + batch.question[:, 1:][batch.learnt[:, 1:]]
        for one in key.unique().tolist():
            kind = batch.kinds[one // 100][one % 100 - 1]
            whole = float(good[key == one].all())
            before = self.right.get(kind, 0.0)
            self.right[kind] = before + (whole - before) * 0.01


def optimizers(model: Moondream) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for all else."""

    def inner(name: str, weight: Tensor) -> bool:
        return weight.ndim == 2 and ("blocks" in name or "proj_mlp" in name)

    matrices = [w for name, w in model.named_parameters() if inner(name, w)]
    others = [w for name, w in model.named_parameters() if not inner(name, w)]
    adam = torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0)
    return [Muon(matrices, lr=MATRIX_LR), adam]


def step(
    model: Moondream, opts: list[torch.optim.Optimizer], batch: Batch, factor: float
) -> tuple[dict[str, float], Tensor, Tensor]:
    """As `losses`, and the weights have learnt from it."""
    parts, right, missed = losses(model, batch)
    for opt in opts:
        opt.zero_grad()
    sum(parts.values(), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for opt, rate in zip(opts, (MATRIX_LR, OTHER_LR), strict=True):
        for group in opt.param_groups:
            group["lr"] = rate * factor
        with torch.autocast("cpu", torch.bfloat16):
            opt.step()
    return {name: float(part.detach()) for name, part in parts.items()}, right, missed


def save(path: Path, model: Moondream, opts: list[torch.optim.Optimizer], progress: Progress) -> None:
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


def load_model(path: Path) -> tuple[Moondream, dict[str, Any]]:
    """The model of a checkpoint and the whole state."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model = Moondream(Shape.of(state["shape"]))
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
        model = Moondream(Shape())
        if args.start is not None:  # a folder lacks the heads that are for training alone
            model.load_state_dict(load_file(args.start / "model.safetensors"), strict=False)
    opts = optimizers(model)
    for opt, saved in zip(opts, state.get("optimizers", []), strict=False):
        opt.load_state_dict(saved)
    tokenizer = tokens_.build()
    rng = Random(args.seed * QUESTION_SEED + progress.step)
    budget_s, last_save, last_log = args.minutes * 60, time.monotonic(), time.monotonic()
    while progress.elapsed_s < budget_s and not stopped.is_set():
        began = time.process_time()
        batch = draw_batch(tokenizer, rng, model.shape, args.pictures)
        factor = min(1.0, (progress.step + 1) / WARMUP_STEPS)
        factor *= min(1.0, (1 - progress.elapsed_s / budget_s) / DECAY_SHARE)
        parts, right, missed = step(model, opts, batch, max(0.0, factor))
        progress.saw(batch, right, missed)
        now = time.monotonic()
        progress.step += 1
        progress.pictures += args.pictures
        progress.elapsed_s += time.process_time() - began
        if now - last_log > args.log_every_s:
            figures = " ".join(f"{k.replace(' ', '-')}={right:.2f}" for k, right in sorted(progress.right.items()))
            losing = " ".join(f"{name}={part:.2f}" for name, part in parts.items())
            miss = np.mean(missed[missed > 0].numpy()) if bool((missed > 0).any()) else 0.0
            print(
                f"{progress.elapsed_s / 60:.1f} min step {progress.step} loss {sum(parts.values()):.3f} {losing} "
                f"{progress.pictures} pictures lr x{factor:.2f} missed by {miss:.0f} bins {figures}",
                flush=True,
            )
            last_log = now
        if now - last_save > args.save_every_s:
            save(args.checkpoint, model, opts, progress)
            last_save = now
    save(args.checkpoint, model, opts, progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=240, help="processor time of the whole run")
    parser.add_argument(
        "--from", dest="start", type=Path, help="a model folder whose weights a new run starts with"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=DEFAULT_CHECKPOINT)
    parser.add_argument("--pictures", type=int, default=16, help="in a step")
    parser.add_argument("--save-every-s", type=float, default=120)
    parser.add_argument("--log-every-s", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    train(parser.parse_args(), stopped)


if __name__ == "__main__":
    main()
