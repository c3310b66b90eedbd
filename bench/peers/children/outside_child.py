"""The child process of `outside.py`. It imports nothing of this project, because it runs under the peer's
Python."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

EOS = 2


class Peer(Protocol):
    def run(self, prompts: list[list[int]], output: int) -> None: ...


sys.path[:] = [
    at for at in sys.path if at != str(Path(__file__).parent)
]  # llama_cpp.py beside this file is not the package


def cache_gib(asked: dict[str, Any]) -> int:
    """Room for all tokens at once, in pages that are not all full."""
    return 1 + int(asked["all"] * 120_000 // 2**30)


def with_weights(folder: str, scratch: str) -> str:
    """The folder, or one with random weights of its `config.json`."""
    if next(Path(folder).glob("*.safetensors"), None):
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = Path(scratch, "made")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(
        made
    )
    return str(made)


class OpenVino:
    """Continuous batching without a prefix cache, products in bfloat16. optimum-intel exports the model, with
    weights in 16 bits or in four, which takes a minute. Beside four bits it rounds inputs to eight, unless it is
    asked for exact ones."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import openvino
        import openvino_genai
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        four_bits = OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0, all_layers=True)
        stored = {"quantization_config": four_bits} if asked["four_bits"] else {"load_in_8bit": False}
        self._tensor, self._genai = openvino.Tensor, openvino_genai
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = cache_gib(asked)
        settings.max_num_seqs = asked["sequences"]
        settings.max_num_batched_tokens = 4096
        settings.enable_prefix_caching = False
        with tempfile.TemporaryDirectory(prefix="petiole-openvino-") as scratch:
            folder = with_weights(asked["folder"], scratch)
            model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, **stored)
            model.save_pretrained(scratch)
            for tokenizer in Path(scratch).glob("openvino_*tokenizer.*"):
                tokenizer.unlink()  # token ids in and out
            options = {"INFERENCE_PRECISION_HINT": "bf16"}
            if asked["exact_inputs"]:
                options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
            if asked["threads"]:
                options["INFERENCE_NUM_THREADS"] = asked["threads"]
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(scratch, settings, "CPU", options)

    def run(self, prompts: list[list[int]], output: int) -> None:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output
        config.ignore_eos, config.do_sample = True, False
        config.eos_token_id, config.stop_token_ids = EOS, {EOS}
        tensors = [self._tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(tensors, [config] * len(prompts))
        assert all(len(result.m_generation_ids[0]) == output for result in results)


class Vllm:
    """vLLM's offline interface, with made-up weights and without a prefix cache."""

    def __init__(self, asked: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cache_gib(asked)))
        if asked["threads"]:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{asked['threads'] - 1}")
        import vllm

        self._lib = vllm
        self._model = vllm.LLM(
            model=asked["folder"],
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=asked["tokens"],
            max_num_seqs=asked["sequences"],
            enable_prefix_caching=False,
        )

    def run(self, prompts: list[list[int]], output: int) -> None:
        sampling = self._lib.SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        results = self._model.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        assert all(len(result.outputs[0].token_ids) == output for result in results)


def main() -> None:
    kind, asked = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output is not an answer

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        peer: Peer = OpenVino(asked) if kind == "openvino" else Vllm(asked)
        peer.run([[5, 6, 7]], 2)
    except ImportError as error:
        return answer({"error": f"not installed: {error.name or error}"})
    except Exception as error:
        return answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"})
    answer({"ready": kind})
    for line in sys.stdin:
        told = json.loads(line)
        began = time.perf_counter()
        peer.run(told["prompts"], told["output"])
        answer({"seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
