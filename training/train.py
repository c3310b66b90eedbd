"""Train `petiole-tiny` from nothing: `python -m training.train --minutes 79`.

The budget is wall time, since it is usually all that a CPU owner knows: the learning rate warms up, holds, and
falls to zero over the last part of it. Examples are drawn anew at every step, so a training answer that comes
out right letter for letter is right on an unseen question; these running figures decide how often each skill
is drawn: what is learnt already is only kept warm.

A checkpoint every few minutes makes the run resumable: start the same command again. `python -m training.export`
turns a checkpoint into the model folder.
"""

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Qwen3, Shape
from training.optimizer import optimizers
from training.text import tokenizer as tokenizers_
from training.text.data import Batch, DrawRow, draw_batches, draw_row
from training.text.skills import DRAWS

DEFAULT_CHECKPOINT = Path(tempfile.gettempdir()) / "petiole-tiny" / "checkpoint.pt"
MATRIX_LR, OTHER_LR = 0.02, 0.003
WARMUP_STEPS = 60
DECAY_SHARE = 0.6
KEEP_WARM = 0.12


@dataclass
class Progress:
    """What a checkpoint remembers beside weights and optimizers."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    right: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DRAWS, 0.0))
    length: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DRAWS, 30.0))

    def saw(self, skill: str, right: bool, length: int) -> None:
        """Note one training answer of `length` tokens, `right` to the letter or not."""
        self.right[skill] += (float(right) - self.right[skill]) * 0.01
        self.length[skill] += (length - self.length[skill]) * 0.01

    def shares(self) -> dict[str, float]:
        """How often to draw each skill: what is not learnt yet more, what costs many tokens less."""
        return {skill: (KEEP_WARM + 1 - self.right[skill]) / self.length[skill] ** 0.5 for skill in self.right}


def learning_rate_factor(step: int, elapsed: float) -> float:
    """Warm up by steps, hold, then fall to zero over the last `DECAY_SHARE` of the budget (`elapsed` in 0..1)."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.0, 1 - elapsed) / DECAY_SHARE)


def gradients(model: Qwen3, batch: Batch, total: float) -> tuple[float, Tensor, tuple[Tensor, ...]]:
    """Loss share of one batch, which next tokens came out right (bool, as `batch.weights`), and the gradients."""
    hidden, _ = model.hidden(batch.tokens[:, :-1])
    chosen = batch.weights > 0
    logits, targets = model.logits(hidden[chosen]), batch.tokens[:, 1:][chosen]
    loss = (F.cross_entropy(logits, targets, reduction="none") * batch.weights[chosen]).sum() / total
    right = torch.zeros_like(chosen)
    right[chosen] = logits.argmax(-1) == targets
    return float(loss.detach()), right, torch.autograd.grad(loss, list(model.parameters()))


def learn(model: Qwen3, batches: list[Batch], progress: Progress, threads: ThreadPoolExecutor) -> float:
    """Gradients of one step into `.grad`; returns its loss.

    Each thread takes a whole batch: on shared cores that loses far less than two threads that meet at every
    matrix product.
    """
    total = sum(float(batch.weights.sum()) for batch in batches)
    loss_sum = 0.0
    sums = [torch.zeros_like(weight) for weight in model.parameters()]
    by_size = sorted(batches, key=lambda batch: -batch.tokens.numel())
    for batch, (loss, right, grads) in zip(
        by_size, threads.map(lambda batch: gradients(model, batch, total), by_size), strict=True
    ):
        loss_sum += loss
        torch._foreach_add_(sums, grads)
        for index, row in enumerate(batch.rows):
            for skill, start, end in row.answers:
                progress.saw(skill, bool(right[index, start - 1 : end - 1].all()), end - start)
        progress.tokens += sum(len(row.tokens) for row in batch.rows)
    for weight, grad in zip(model.parameters(), sums, strict=True):
        weight.grad = grad
    return loss_sum


def save(path: Path, model: Qwen3, opts: list[torch.optim.Optimizer], progress: Progress) -> None:
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


def load_model(path: Path) -> tuple[Qwen3, dict[str, Any]]:
    """The model of a checkpoint and the whole state."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model = Qwen3(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model, state


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    if args.checkpoint.exists():
        model, state = load_model(args.checkpoint)
    else:
        model, state = Qwen3(Shape()), {}
    go_on(args, model, state, Progress(), (MATRIX_LR, OTHER_LR))


def go_on(
    args: argparse.Namespace,
    model: Qwen3,
    state: dict[str, Any],
    progress: Progress,
    rates: tuple[float, float],
    draw: DrawRow = draw_row,
) -> None:
    """Train `model` until its minutes are over. `state`: of a checkpoint, if there is one. `progress`: where it
    begins without. `rates`: of the matrices and of the rest. `draw`: what it learns from."""
    torch.set_num_threads(1)
    threads = ThreadPoolExecutor(args.threads, initializer=lambda: torch.set_num_threads(1))
    if state:
        progress = Progress(**state["progress"])
    opts = optimizers(model, *rates)
    for opt, saved in zip(opts, state.get("optimizers", []), strict=False):
        opt.load_state_dict(saved)
    tokenizer = tokenizers_.build()
    rng = Random(args.seed * 1_000_003 + progress.step)
    budget_s, last_save, last_log = args.minutes * 60, time.monotonic(), time.monotonic()
    while progress.elapsed_s < budget_s:
        began = time.monotonic()
        batches = draw_batches(tokenizer, rng, progress.shares(), args.step_tokens, args.batch_tokens, draw)
        loss = learn(model, batches, progress, threads)
        factor = learning_rate_factor(progress.step, progress.elapsed_s / budget_s)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, rate in zip(opts, rates, strict=True):
            for group in opt.param_groups:
                group["lr"] = rate * factor
            opt.step()
        now = time.monotonic()
        progress.step += 1
        progress.elapsed_s += now - began
        if now - last_log > args.log_every_s:
            figures = " ".join(f"{skill.replace(' ', '-')}={right:.2f}" for skill, right in progress.right.items())
            rate = progress.tokens / progress.elapsed_s
            print(
                f"{progress.elapsed_s / 60:.1f} min step {progress.step} loss {loss:.4f} "
                f"{progress.tokens / 1e6:.2f}M tokens {rate:.0f}/s lr x{factor:.2f} {figures}",
                flush=True,
            )
            last_log = now
        if now - last_save > args.save_every_s:
            save(args.checkpoint, model, opts, progress)
            last_save = now
    save(args.checkpoint, model, opts, progress)


def arguments(about: str | None, minutes: float, checkpoint: Path) -> argparse.Namespace:
    """What a run is asked for. `minutes`, `checkpoint`: the defaults of one kind of run."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="wall time of the whole run, resumptions included"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, default=checkpoint)
    parser.add_argument("--step-tokens", type=int, default=4500)
    parser.add_argument("--batch-tokens", type=int, default=1500)
    parser.add_argument("--save-every-s", type=float, default=120)
    parser.add_argument("--log-every-s", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    train(arguments(__doc__, 79, DEFAULT_CHECKPOINT))


if __name__ == "__main__":
    main()
