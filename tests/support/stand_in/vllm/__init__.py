"""Stands in for vLLM: what `petiole/engines/vllm/program.py` uses of it, with tokens that are made up.

A token is a function of all tokens before it, so a resumed request continues as it would have. A constrained
output has the first string of its grammar that may come, again and again, and ends where it may. Like vLLM's, its
engine has a rank: another process, which must answer when it is asked for a sign of life, and which ends at a step
that cannot load an adapter. `STAND_IN_START=hang` or `fail`, `STAND_IN_PAUSE=fail` and `STAND_IN_STEP_MS` say how
it behaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import types
import zlib
from collections.abc import AsyncIterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

__version__ = "0.0"
VOCABULARY = 512
STEP_S = float(os.environ.get("STAND_IN_STEP_MS", "2")) / 1000


def token(before: list[int]) -> int:
    return zlib.crc32(json.dumps(before).encode()) % 500


class EngineDeadError(Exception):
    """Its rank has ended."""


class VLLMClientError(Exception):
    """A request that is refused. It is no ValueError."""


class RequestOutputKind(Enum):
    DELTA = 1


class StructuredOutputsParams:
    def __init__(self, grammar: str) -> None:
        self.grammar = grammar


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        self.__dict__ |= dict.fromkeys(("logprobs", "logprob_token_ids", "prompt_logprobs")) | options
        self.structured_outputs = options.get("structured_outputs")
        if options["max_tokens"] < 1:
            raise VLLMClientError("max_tokens must be at least 1")
        if not options.get("temperature", 1) <= 2:
            raise VLLMClientError("temperature must be in [0, 2]")
        named = options.get("logprob_token_ids")
        if named is not None and self.logprobs not in (None, len(named)):
            raise VLLMClientError("logprobs must equal len(logprob_token_ids)")


class LoRARequest:
    def __init__(self, name: str, number: int, path: str) -> None:
        self.number, self.path = number, path


class AsyncEngineArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("model", "dtype", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "max-loras"):
            parser.add_argument(f"--{name}")
        for name in ("served-model-name", "gpu-memory-utilization", "max-logprobs", "scheduling-policy"):
            parser.add_argument(f"--{name}")
        for name in ("structured-outputs-config.backend", "generation-config", "max-lora-rank"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--enable-lora", action="store_true")
        return parser

    @classmethod
    def from_cli_args(cls, given: argparse.Namespace) -> argparse.Namespace:
        return given


class AsyncLLM:
    @classmethod
    def from_engine_args(cls, given: argparse.Namespace, stat_loggers: list[Any]) -> AsyncLLM:
        match os.environ.get("STAND_IN_START"):
            case "hang":
                time.sleep(3600)
            case "fail":
                raise ValueError("no such architecture")
        return cls(given, stat_loggers[0](None))

    def __init__(self, given: argparse.Namespace, logger: Any) -> None:
        self.logger, self.running, self.errored, self.going = logger, 0, False, asyncio.Event()
        self.adapters: set[int] = set()
        self.going.set()
        config = json.loads(Path(given.model, "config.json").read_text())
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.vllm_config = Some(
            model_config=Some(
                get_vocab_size=lambda: VOCABULARY,
                max_model_len=int(given.max_model_len or 2048),
                dtype="torch.float32",
                quantization=None,
                hf_overrides=None,
                is_multimodal_model="image_token_id" in config,
                try_get_generation_config=dict,
                hf_config=Some(eos_token_id=511, image_token_id=config.get("image_token_id")),
            ),
            cache_config=Some(block_size=16, num_gpu_blocks=1000),
            scheduler_config=Some(max_num_seqs=int(given.max_num_seqs or 8), max_num_batched_tokens=256),
        )
        tokenizer = Path(given.model, "tokenizer.json")
        self.tokenizer = tokenizer if tokenizer.exists() else None

    async def add_lora(self, adapter: LoRARequest) -> bool:
        config = Path(adapter.path, "adapter_config.json")
        if not config.exists() or "r" not in json.loads(config.read_text()):
            raise Exception(
                "Call to add_lora method failed: no rank"
            )  # as vLLM, whose calls raise nothing narrower
        self.adapters.add(adapter.number)
        return True

    async def collective_rpc(self, method: str) -> None:
        while (state := self._state()) == "T":
            await asyncio.sleep(0.02)
        if state is None:
            self.errored = True
            raise EngineDeadError("a rank has ended")

    def _state(self) -> str | None:
        if self.rank.poll() is not None:
            return None
        return Path(f"/proc/{self.rank.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        before, made = list(prompt["prompt_token_ids"]), 0
        pictures = prompt.get("multi_modal_data", {}).get("image", ())
        before[:0] = [zlib.crc32(picture.tobytes()) for picture in pictures]
        scores = None if params.prompt_logprobs is None else [None, *(self._scored(one, 1) for one in before[1:])]
        asked = self._answer(params)
        if lora_request is not None and lora_request.number not in self.adapters:
            self.rank.kill()
            self.rank.wait()
        self.running += 1
        try:
            while True:
                await asyncio.sleep(STEP_S)
                await self.going.wait()
                await self.collective_rpc("step")
                self.logger.record(Some(num_running_reqs=self.running, num_waiting_reqs=0, kv_cache_usage=0.5))
                fresh = asked[made] if asked else token(before)
                before.append(fresh)
                made += 1
                ends = fresh in params.stop_token_ids
                end = "stop" if ends else "length" if made >= params.max_tokens else None
                logprobs = None if params.logprobs is None else [self._scored(fresh, params.logprobs)]
                if named := params.logprob_token_ids:
                    logprobs = [self._scored(fresh, 1) | {one: Some(logprob=-2.5, rank=7) for one in named}]
                one = Some(token_ids=[fresh], logprobs=logprobs, finish_reason=end)
                yield Some(outputs=[one], num_cached_tokens=0, prompt_logprobs=scores)
                if end:
                    return
        finally:
            self.running -= 1

    def _answer(self, params: Any) -> list[int]:
        if params.structured_outputs is None:
            return []
        from llguidance import LLMatcher, LLTokenizer, grammar_from
        from tokenizers import Tokenizer

        assert self.tokenizer is not None
        text, tokenizer = params.structured_outputs.grammar, Tokenizer.from_file(str(self.tokenizer))
        grammar = grammar_from("grammar", text)
        if error := LLMatcher.validate_grammar(grammar):
            raise VLLMClientError(f"Grammar error: {error}")
        matcher = LLMatcher(LLTokenizer(self.tokenizer.read_text(), eos_token=511), grammar)
        strings = [json.loads(one) for one in re.findall(r'"(?:\\.|[^"\\])*"', text)]
        spelled = [tokenizer.encode(one, add_special_tokens=False).ids for one in strings]
        found: list[int] = []
        while not matcher.is_stopped() and len(found) < params.max_tokens:
            allowed = [v for v, bits in enumerate(matcher.compute_logit_bias()) if bits]
            last = 511 if 511 in allowed else allowed[0]
            fresh = next((ids for ids in spelled if ids and matcher.validate_tokens(ids) == len(ids)), [last])
            matcher.consume_tokens(fresh)
            found += fresh
        return [*found, 511]

    @staticmethod
    def _scored(own: int, top: int) -> dict[int, Any]:
        return {own: Some(logprob=-1.5, rank=1)} | {
            (own + k) % VOCABULARY: Some(logprob=-1.5 - k, rank=k + 1) for k in range(1, top)
        }

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        if os.environ.get("STAND_IN_PAUSE") == "fail":
            raise ValueError("no pause now")
        self.going.clear()

    async def resume_generation(self) -> None:
        self.going.set()

    def shutdown(self) -> None:
        self.rank.kill()


def _module(name: str, **names: Any) -> None:
    """A module under vLLM's own name for it."""
    sys.modules[f"{__name__}.{name}"] = module = types.ModuleType(f"{__name__}.{name}")
    module.__dict__.update(names)


for _package in ("lora", "engine", "utils", "v1", "v1.engine", "multimodal"):
    _module(_package, __path__=[])
_module("lora.request", LoRARequest=LoRARequest)
_module("sampling_params", RequestOutputKind=RequestOutputKind, StructuredOutputsParams=StructuredOutputsParams)
_module("exceptions", VLLMClientError=VLLMClientError)
_module("engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
_module("utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
_module("v1.engine.async_llm", AsyncLLM=AsyncLLM)
_module("v1.engine.exceptions", EngineDeadError=EngineDeadError)
_module("multimodal.image", convert_image_mode=lambda picture, mode: picture.convert(mode))
_module("platforms", current_platform=Some(device_type="cpu"))
