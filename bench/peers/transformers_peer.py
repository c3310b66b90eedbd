"""transformers over a whole load: `generate` on one padded batch, and its own continuous batching.

Both take the same prompts, make the same number of tokens for each, and return output tokens a second. By default
continuous batching sizes its cache by the free memory of a GPU. Here the cache is as large as the load needs,
because on a CPU every step attends to all of the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from bench.harness.report import NotAvailableError

PAGE = 256
GIVE_UP_S = 120.0
NO_EOS = -1


class Transformers:
    """A model of transformers on a device, on as many threads as torch has."""

    def __init__(self, folder: str, dtype: str, device: str = "cpu") -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise NotAvailableError(f"not installed: {error.name}") from error
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self.model.to(device).eval()

    def tokens(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """`output` tokens for each of the prompts, which are equally long."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor(prompts, device=self.model.device)
            made = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output,
                min_new_tokens=output,
                do_sample=False,
                pad_token_id=0,
            )
        lists: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return lists

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """All prompts in one batch."""
        began = time.perf_counter()
        made = self.tokens(prompts, output)
        return sum(map(len, made)) / (time.perf_counter() - began)

    def continuous_batching(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """From the first request added to the last result taken, of a manager that is already running."""
        try:
            from transformers import GenerationConfig
            from transformers.generation.configuration_utils import ContinuousBatchingConfig
        except ImportError as error:
            raise NotAvailableError(f"this transformers has no continuous batching: {error}") from error
        greedy = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=NO_EOS, pad_token_id=0)
        pages = -(-(len(prompts[0]) + output) // PAGE)
        limits = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=pages * len(prompts) + 1, max_batch_tokens=max(512, len(prompts))
        )
        try:
            with self.model.continuous_batching_context_manager(
                generation_config=greedy, continuous_batching_config=limits
            ) as manager:
                collect(manager, prompts[:1], 2)
                began = time.perf_counter()
                tokens = collect(manager, prompts, output)
                seconds = time.perf_counter() - began
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotAvailableError(f"on {self.model.device.type}: {error}") from error
        assert tokens == len(prompts) * output
        return tokens / seconds


def collect(manager: Any, prompts: Sequence[Sequence[int]], output: int) -> int:
    """The tokens of all outputs."""
    waiting = set(manager.add_requests(inputs=[list(prompt) for prompt in prompts], max_new_tokens=output))
    tokens, last = 0, time.monotonic()
    while waiting:
        result = manager.get_result(timeout=1)
        if result is not None and result.request_id in waiting:
            if result.error:
                raise RuntimeError(result.error)
            waiting.discard(result.request_id)
            tokens, last = tokens + len(result.generated_tokens), time.monotonic()
        elif time.monotonic() - last > GIVE_UP_S:
            raise RuntimeError(f"no result within {GIVE_UP_S:.0f} s")
    return tokens
