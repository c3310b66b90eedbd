"""The child process of `llama_cpp.py`: the low-level interface of `llama-cpp-python`. It imports nothing of this
project."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_CONTEXT_STEP = 256
"""llama.cpp rounds the room of a sequence to a multiple of this."""
_TURNS = 12
"""How often a model with states may be asked to decode."""


class Model:
    """One model. `decode` and `prefill` try attention with and without flash, and keep the faster one."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._threads, self._vocab = asked["threads"], asked["vocab"]
        self._flash: dict[tuple[int, int], bool] = {}
        self._turns = _TURNS if asked["states"] else 1
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        if hasattr(settings, "use_extra_bufts"):
            settings.use_extra_bufts = asked["extra"]
        self._path, self._settings = asked["path"].encode(), settings
        self._model = llama_cpp.llama_model_load_from_file(self._path, settings)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the model")

    def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> Callable[[], float]:
        """Computes the prompts. Returns a function that decodes `n_tokens` for each and returns the seconds."""
        tried = [_Batch(self, prompts, flash, 2 + self._turns * n_tokens) for flash in (False, True)]
        for batch in tried:
            batch.fill()
            batch.decode(2)
        batch = self._faster(tried, [batch.decode(n_tokens) for batch in tried])
        return lambda: batch.decode(n_tokens)

    def prefill(self, prompt: Sequence[int]) -> Callable[[], float]:
        tried = [_Batch(self, [prompt], flash, 0) for flash in (False, True)]
        return self._faster(tried, [batch.fill() for batch in tried]).fill

    def load(self) -> float:
        """Seconds to read the file again, without mapping it."""
        self._settings.use_mmap = False
        began = time.perf_counter()
        model = self._lib.llama_model_load_from_file(self._path, self._settings)
        seconds = time.perf_counter() - began
        self._lib.llama_model_free(model)
        return seconds

    def whole(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        """Seconds from the first prompt to the last of `n_tokens` for each, by the attention that was faster in
        the first load of this size."""
        load = len(prompts), n_tokens
        found: dict[bool, float] = {}
        for flash in [self._flash[load]] if load in self._flash else [False, True]:
            batch = _Batch(self, prompts, flash, n_tokens)
            found[flash] = batch.fill() + batch.decode(n_tokens - 1)
            batch.close()
        self._flash[load] = min(found, key=lambda flash: found[flash])
        return min(found.values())

    def _faster(self, tried: list[_Batch], seconds: list[float]) -> _Batch:
        best = seconds.index(min(seconds))
        tried[1 - best].close()
        return tried[best]


class _Batch:
    """One context: a sequence for each prompt, and room for `n_tokens` after it. Methods return the seconds that
    they took."""

    def __init__(self, peer: Model, prompts: Sequence[Sequence[int]], flash: bool, n_tokens: int) -> None:
        self._lib, self._vocab, self._prompts = peer._lib, peer._vocab, prompts
        settings = self._lib.llama_context_default_params()
        each = max(map(len, prompts)) + n_tokens
        settings.n_ctx = len(prompts) * -(-each // _CONTEXT_STEP) * _CONTEXT_STEP
        settings.n_batch = settings.n_ubatch = 512
        settings.n_seq_max = len(prompts)
        settings.n_threads = settings.n_threads_batch = peer._threads
        settings.flash_attn_type = int(flash)
        self._context = self._lib.llama_init_from_model(peer._model, settings)
        if not self._context:
            raise RuntimeError("llama.cpp gives no context")
        self._batch = self._lib.llama_batch_init(512, 0, 1)
        self._tokens = [0] * len(prompts)
        self._length = 0

    def fill(self) -> float:
        """All prompts from nothing, up to the first token of each."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        began = time.perf_counter()
        for sequence, prompt in enumerate(self._prompts):
            for at in range(0, len(prompt), 512):
                part = prompt[at : at + 512]
                self._run([(token, at + i, sequence) for i, token in enumerate(part)], last_only=True)
            self._tokens[sequence] = self._drawn(len(part) - 1)
        self._length = len(self._prompts[0])
        return time.perf_counter() - began

    def decode(self, n_tokens: int) -> float:
        """Decode tokens after the prompts, and forget these tokens. States cannot forget them: the next tokens
        follow."""
        began = time.perf_counter()
        for position in range(self._length, self._length + n_tokens):
            self._run([(token, position, i) for i, token in enumerate(self._tokens)], last_only=False)
            self._tokens = [self._drawn(i) for i in range(len(self._tokens))]
        seconds = time.perf_counter() - began
        memory = self._lib.llama_get_memory(self._context)
        for sequence in range(len(self._tokens)):
            if not self._lib.llama_memory_seq_rm(memory, sequence, self._length, -1):
                self._length += n_tokens
                break
        return seconds

    def _run(self, inputs: Sequence[tuple[int, int, int]], *, last_only: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(inputs)
        for i, (token, position, sequence) in enumerate(inputs):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = not last_only or i == len(inputs) - 1
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp does not decode the batch")

    def _drawn(self, i: int) -> int:
        logits = self._lib.llama_get_logits_ith(self._context, i)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)


def main() -> None:
    asked = json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output is not an answer

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        model = Model(asked)
    except ImportError as error:
        return answer({"error": f"not installed: {error.name or error}"})
    except Exception as error:
        return answer({"error": f"{type(error).__name__}: {error}"})
    answer({"ready": True})
    works: list[Callable[[], float]] = []
    for line in sys.stdin:
        told = json.loads(line)
        match told["do"]:
            case "decode":
                works.append(model.decode(told["prompts"], told["tokens"]))
                answer({"work": len(works) - 1})
            case "prefill":
                works.append(model.prefill(told["prompts"][0]))
                answer({"work": len(works) - 1})
            case "load":
                answer({"seconds": model.load()})
            case "whole":
                answer({"seconds": model.whole(told["prompts"], told["tokens"])})
            case "run":
                answer({"seconds": works[told["work"]]()})


if __name__ == "__main__":
    main()
