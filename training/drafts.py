"""Train the head that drafts for `petiole-tiny`, into its folder: `python -m training.drafts --minutes 20`.

The model stays as it is. The head is one layer, in the form of Qwen3.5's `mtp.*`
(`gpu_worker/models/parts/layer.py`): from what the model makes of a token, and from the token after it, it makes
the token after that. A chain goes on with its own output, so it learns to: pass s drafts s tokens ahead, and its
inputs are the outputs of pass s - 1. It attends to the first pass's keys of all earlier positions, and to those of
its own chain, as in the engine.

It learns the model's own probabilities of the next token, since a draft is right if the model draws it, too."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.decode import load_folder
from training.export import MODEL_FOLDER
from training.model import Layer, Qwen3, RMSNorm, Shape, rotate
from training.optimizer import optimizers
from training.text.data import Batch, draw_batches
from training.text.skills import DRAWS

HEAD, HEAD_FILE = "mtp.", "mtp.safetensors"
"""What names of its weights begin with, and their file."""
MATRIX_LR, OTHER_LR = 0.01, 0.002
WARMUP_STEPS, DECAY_SHARE = 20, 0.6
PASSES, FIRST_PASS_ALONE = 2, 0.5
PASS_WEIGHT = 0.7
"""Of each pass, beside that of the pass before."""


class Head(nn.Module):
    """Names as in a checkpoint, behind `mtp.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = RMSNorm(size, eps)
        self.pre_fc_norm_hidden = RMSNorm(size, eps)
        self.layers = nn.ModuleList([Layer(shape)])
        self.norm = RMSNorm(size, eps)

    @classmethod
    def beginning(cls, model: Qwen3) -> Head:
        """A head whose layer is a copy of the model's last one. It reads the token, and at first little else."""
        head = cls(model.shape)
        head.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        head.norm.load_state_dict(model.model.norm.state_dict())
        size = model.shape.hidden_size
        with torch.no_grad():
            head.fc.weight[:] = 0.3 * torch.eye(size, 2 * size).roll(size, 1) + 0.7 * torch.eye(size, 2 * size)
        return head

    def passes(self, model: Qwen3, tokens: Tensor, hidden: Tensor, n: int) -> list[Tensor]:
        """What `n` passes make: of each, float32 [batch, length - pass, hidden], whose place p is of the token
        p + pass + 1. tokens: int64 [batch, length]; hidden: what the model makes of them, [batch, length,
        hidden]."""
        made, keys, values = list[Tensor](), list[Tensor](), list[Tensor]()
        for ahead in range(1, n + 1):
            length = tokens.shape[1] - ahead
            token = self.pre_fc_norm_embedding(model.model.embed_tokens(tokens[:, ahead:]))
            before = self.pre_fc_norm_hidden(hidden[:, :length])
            x = self.fc(torch.cat((token, before), dim=-1))
            x = self._layer(model, x, ahead, keys, values)
            hidden = self.norm(x)
            made.append(hidden)
        return made

    def _layer(self, model: Qwen3, x: Tensor, ahead: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The layer in a pass. Appends its keys and values to those of the passes before."""
        layer, (batch, length, _) = self.layers[0], x.shape
        own, at = layer.self_attn, slice(ahead - 1, ahead - 1 + length)
        cos, sin = model.cos[at], model.sin[at]

        def heads(y: Tensor, n: int) -> Tensor:
            return y.view(batch, length, n, own.head_dim)

        y = layer.input_layernorm(x)
        q = rotate(own.q_norm(heads(own.q_proj(y), own.heads)).transpose(1, 2), cos, sin)
        k = rotate(own.k_norm(heads(own.k_proj(y), own.kv_heads)).transpose(1, 2), cos, sin)
        v = heads(own.v_proj(y), own.kv_heads).transpose(1, 2)
        groups = own.heads // own.kv_heads
        keys.append(k.repeat_interleave(groups, dim=1))
        values.append(v.repeat_interleave(groups, dim=1))
        q = q * own.head_dim**-0.5
        first, chain = keys[0][:, :, :length], [key[:, :, :length] for key in keys[1:]]
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(q @ first.transpose(-1, -2)).masked_fill(unseen, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key in chain]
        shares = torch.cat(scores, dim=-1).softmax(-1)
        out = shares[..., :length] @ values[0][:, :, :length]
        for i, value in enumerate(values[1:]):
            out = out + shares[..., length + i, None] * value[:, :, :length]
        x = x + own.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        fed: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return fed


def load_head(folder: Path) -> Head:
    """The shipped head, widened to float32."""
    config = json.loads((folder / "config.json").read_text())
    head = Head(Shape(**{name: config[name] for name in Shape().as_dict()}))
    head.load_state_dict({name.removeprefix(HEAD): w for name, w in load_file(folder / HEAD_FILE).items()})
    return head.float().eval()


def add_head(head: Head, folder: Path) -> None:
    """Write the head beside the weights of the folder, in bfloat16. The index names the weights alone: programs
    that take every file of a folder (vLLM) refuse what they do not know."""
    weights = {HEAD + name: w.to(torch.bfloat16).contiguous() for name, w in head.state_dict().items()}
    save_file(weights, folder / HEAD_FILE, metadata={"format": "pt"})
    (folder / HEAD_FILE).chmod(0o644)
    with safe_open(folder / "model.safetensors", "pt") as file:
        index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def loss_of(model: Qwen3, head: Head, batch: Batch, n_passes: int) -> tuple[Tensor, list[float]]:
    """The loss, and which share of each pass's drafts is the model's likeliest token."""
    tokens = batch.tokens[:, :-1]
    with torch.no_grad():
        hidden, _ = model.hidden(tokens)
        likely = model.logits(hidden).softmax(-1)
    loss, shares = torch.zeros(()), list[float]()
    for ahead, made in enumerate(head.passes(model, tokens, hidden, n_passes), 1):
        weights = batch.weights[:, ahead:]
        chosen = weights > 0
        logits, wanted = model.logits(made[chosen]), likely[:, ahead:][chosen]
        loss = (
            loss
            + PASS_WEIGHT ** (ahead - 1)
            * (F.cross_entropy(logits, wanted, reduction="none") * weights[chosen]).sum()
        )
        shares.append(float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()))
    return loss / batch.weights.sum(), shares


def accepted(
    model: Qwen3, head: Head, texts: Sequence[tuple[Sequence[int], Sequence[int]]], n: int
) -> list[float]:
    """How many of a chain's first, second, ... drafts are accepted on average, of greedy text. texts: prompts, and
    the model's own answers to them."""
    hits, drafted = torch.zeros(n), torch.zeros(n)
    with torch.inference_mode():
        for prompt, answer in texts:
            tokens = torch.tensor([[*prompt, *answer]])
            hidden, _ = model.hidden(tokens)
            right = torch.ones(tokens.shape[1], dtype=torch.bool)
            for ahead, made in enumerate(head.passes(model, tokens, hidden, n), 1):
                drafts, sampled = model.logits(made[0]).argmax(-1)[:-1], tokens[0, ahead + 1 :]
                right = right[: len(drafts)] & (drafts == sampled)
                answered = right[len(prompt) - 1 :]
                hits[ahead - 1] += answered.sum()
                drafted[ahead - 1] += len(answered)
    return (hits / drafted.clamp(min=1)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument("--step-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model, tokenizer = load_folder(args.folder)
    model.requires_grad_(False)
    head, rng = Head.beginning(model), Random(args.seed)
    opts, rates = optimizers(head, MATRIX_LR, OTHER_LR), (MATRIX_LR, OTHER_LR)
    began, budget_s, step, tokens, told = time.monotonic(), 60 * args.minutes, 0, 0, 0.0
    while (elapsed := (time.monotonic() - began) / budget_s) < 1:
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1 - elapsed) / DECAY_SHARE)
        for opt, rate in zip(opts, rates, strict=True):
            opt.zero_grad()
            for group in opt.param_groups:
                group["lr"] = rate * factor
        drawn = draw_batches(tokenizer, rng, dict.fromkeys(DRAWS, 1.0), args.step_tokens, args.step_tokens)
        for batch in drawn:
            loss, shares = loss_of(model, head, batch, args.passes if elapsed > FIRST_PASS_ALONE else 1)
            (loss / len(drawn)).backward()
            tokens += batch.tokens.numel()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for opt in opts:
            opt.step()
        step += 1
        if time.monotonic() - told > 30:
            told = time.monotonic()
            right = " ".join(f"{share:.3f}" for share in shares)
            print(
                f"{elapsed * args.minutes:.1f} min step {step} loss {loss:.4f} right {right} {tokens / 1e6:.2f}M",
                flush=True,
            )
    add_head(head, args.folder)


if __name__ == "__main__":
    main()
