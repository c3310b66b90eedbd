"""vLLM as a peer on a CUDA device: its offline interface, token ids in and out, random weights of the same shape.

Optional: used if `vllm` can be imported.
"""

from __future__ import annotations

import gc
import importlib.util
import time
from collections.abc import Sequence
from typing import Any

from bench.harness.report import NotAvailableError
from petiole.gpu_worker.request import Request


def require() -> None:
    """Raises NotAvailableError before anything is loaded."""
    if importlib.util.find_spec("vllm") is None:
        raise NotAvailableError("not installed")


class Vllm:
    """One model. It reads only `config.json` of `folder`, and draws random weights. Its prefix cache is on, like
    ours. `memory`: the share of the card's memory that it may take, weights included."""

    def __init__(self, folder: str, *, dtype: str, max_model_len: int, max_num_seqs: int, memory: float) -> None:
        import vllm

        self._lib: Any = vllm
        self._model = vllm.LLM(
            model=folder,
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=memory,
        )

    def throughput(self, requests: Sequence[Request]) -> float:
        """Output tokens a second, from the first prompt handed over to the last result."""
        prompts = [{"prompt_token_ids": list(request.prompt or ())} for request in requests]
        sampling = [
            self._lib.SamplingParams(
                temperature=request.sampling.temperature,
                max_tokens=request.sampling.max_tokens,
                ignore_eos=request.sampling.ignore_eos,
                detokenize=False,
            )
            for request in requests
        ]
        began = time.perf_counter()
        results = self._model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(result.outputs[0].token_ids) for result in results) / seconds

    def close(self) -> None:
        del self._model
        gc.collect()
