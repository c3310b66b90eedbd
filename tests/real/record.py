"""What llama.cpp answers, for references.json. Needs `llama-cpp-python` alone, in an environment of its own:

    python record.py MODEL.gguf > answer.json

Nothing of this project is imported. Extra buffers are off: with them, builds die on processors with AMX."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

TOGETHER, OUTPUT = 128, 24
WINDOW, WINDOWS = 1024, 8
HERE = Path(__file__).parent


def windows(tokens: list[int], first: list[int]) -> list[list[int]]:
    """The parts of the long text, each behind the tokens with which a prompt begins."""
    size = WINDOW - len(first)
    assert len(tokens) >= WINDOWS * size
    return [first + tokens[i * size : (i + 1) * size] for i in range(WINDOWS)]


class LlamaCpp:
    def __init__(self, path: str) -> None:
        import llama_cpp

        usual = llama_cpp.llama_cpp.llama_model_default_params

        def settings() -> Any:
            made = usual()
            made.use_extra_bufts = False
            return made

        llama_cpp.llama_cpp.llama_model_default_params = settings
        self._lib: Any = llama_cpp
        self._model = llama_cpp.Llama(path, n_ctx=2560, n_batch=TOGETHER, n_ubatch=TOGETHER, verbose=False)
        self._context = self._model._ctx.ctx
        self._batch = llama_cpp.llama_batch_init(TOGETHER, 0, 1)

    def tokens(self, text: str, *, begin: bool = True) -> list[int]:
        return list(self._model.tokenize(text.encode(), add_bos=begin, special=True))

    def nats(self, tokens: list[int]) -> float:
        self.clear()
        rows = self.logprobs(tokens, every=True)
        return -sum(float(row[token]) for row, token in zip(rows, tokens[1:], strict=False))

    def logprobs(self, tokens: list[int], past: int = 0, *, every: bool = False) -> list[Any]:
        """Of all tokens behind the last of `tokens`, or behind each of them."""
        batch, found = self._batch, []
        for first in range(0, len(tokens), TOGETHER):
            part = tokens[first : first + TOGETHER]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, past + first + i, 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = every or first + i == len(tokens) - 1
            assert self._lib.llama_decode(self._context, batch) == 0
            places = range(len(part)) if every else [len(part) - 1] if first + len(part) == len(tokens) else []
            found += [self._row(i) for i in places]
        return found

    def _row(self, i: int) -> Any:
        logits = self._lib.llama_get_logits_ith(self._context, i)
        row = np.ctypeslib.as_array(logits, (self._model.n_vocab(),)).astype(np.float64)
        row -= row.max()
        return row - np.log(np.exp(row).sum())

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def ends(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self._model._model.vocab, token))


def main() -> None:
    model, texts = LlamaCpp(sys.argv[1]), json.loads((HERE / "texts.json").read_text())
    text = model.tokens((HERE / "text.txt").read_text())
    nats = model.nats(text)
    long = (HERE / "long_text.txt").read_text()
    whole, plain = model.tokens(long), model.tokens(long, begin=False)
    parts = windows(plain, whole[: len(whole) - len(plain)])
    greedy = []
    for prompt in texts["prompts"]:
        model.clear()
        tokens, past, ids, margins = model.tokens(prompt), 0, [], []
        for _ in range(OUTPUT):
            [row] = model.logprobs(tokens, past)
            past += len(tokens)
            second, best = np.argsort(row)[-2:]
            ids.append(int(best))
            margins.append(round(float(row[best] - row[second]), 4))
            if model.ends(int(best)):
                break
            tokens = [int(best)]
        greedy.append([ids, margins])
    found = {
        "tokens": [model.tokens(one) for one in texts["hard"]],
        "nats": {"llama.cpp": [round(nats, 3), len(text) - 1]},
        "long": {"llama.cpp": [round(sum(map(model.nats, parts)), 3), WINDOWS * (WINDOW - 1)]},
        "greedy": greedy,
    }
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()
