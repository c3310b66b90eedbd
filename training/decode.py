"""Batched greedy decoding with a KV cache: the yardstick of `training.evaluate`.

Prompts are padded on the left, so that every row's next token stands in the last column.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Qwen3, Shape
from training.text.tokenizer import END_OF_TEXT_ID, IM_END_ID


def load_folder(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Qwen3, Tokenizer]:
    """The shipped model; its bfloat16 weights widened to float32, or computed with as they are."""
    config = json.loads((folder / "config.json").read_text())
    model = Qwen3(Shape(**{name: config[name] for name in Shape().as_dict()}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def greedy(model: Qwen3, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """The answer to each prompt, without its end-of-sequence token; cut at `max_tokens`."""
    length = max(map(len, prompts))
    tokens = torch.full((len(prompts), length), END_OF_TEXT_ID)
    seen = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens[row, length - len(prompt) :] = torch.tensor(prompt)
        seen[row, length - len(prompt) :] = True
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    # a padding row of the mask sees itself: a softmax over nothing is not a number
    mask = (seen[:, None, :] & torch.ones(length, length).tril().bool()) | torch.eye(length).bool()
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    with torch.inference_mode():
        hidden, cache = model.hidden(tokens, positions, mask=mask[:, None])
        for _ in range(max_tokens):
            next_token: Tensor = model.logits(hidden[:, -1]).argmax(-1)
            keep = []
            for index, (row, token) in enumerate(zip(rows, next_token.tolist(), strict=True)):
                if token not in (IM_END_ID, END_OF_TEXT_ID):
                    answers[row].append(token)
                    keep.append(index)
            if not keep:
                break
            if len(keep) < len(rows):
                rows = [rows[index] for index in keep]
                next_token, seen, positions = next_token[keep], seen[keep], positions[keep]
                cache = [(k[keep], v[keep]) for k, v in cache]
            seen = torch.cat((seen, torch.ones(len(rows), 1, dtype=torch.bool)), dim=1)
            positions = positions[:, -1:] + 1
            hidden, cache = model.hidden(next_token[:, None], positions, cache, seen[:, None, None])
    return answers
