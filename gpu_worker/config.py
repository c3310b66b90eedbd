"""The engine's settings, validated on construction, and its switches.

Switches are environment variables that hold for the whole process, whichever engine runs in it:

    PETIOLE_NATIVE    off: a CPU's models are computed by torch alone
    PETIOLE_TILES     off: the compiled kernels do without AMX
    PETIOLE_EXACT     on: a CPU's logits have the same bits in any batch; off: speed decides alone,
                      and on CUDA the prompts of delta nets are computed in chunks
    PETIOLE_PRODUCTS  own, library: whose kernels multiply on a CPU; nothing is measured
    PETIOLE_PROGRESS  off: no progress bar while a model is loaded"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from petiole.gpu_worker.errors import require

_INT32 = 2**31 - 1  # page tables and row indices are int32

SWITCHES = {
    "native": ("on", "off"),
    "tiles": ("on", "off"),
    "exact": ("auto", "on", "off"),
    "products": ("auto", "own", "library"),
    "progress": ("on", "off"),
}
"""The values of each, its default first."""
_SPELLINGS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


def switch(name: str) -> str:
    """Its value now. Raises InvalidRequest if it may not have it."""
    given = os.environ.get(f"PETIOLE_{name.upper()}", "")
    values = SWITCHES[name]
    value = _SPELLINGS.get(given.lower(), given.lower()) or values[0]
    require(value in values, name, f"must be one of {', '.join(values)}", given)
    return value


@dataclass(frozen=True, slots=True)
class Batching:
    """How much runs at once: the values that the engine uses for the settings of the same names."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    chunk_size: int = 512

    def divided(self, by: int) -> Batching:
        numbers = (self.max_num_seqs, self.max_num_batched_tokens, self.chunk_size)
        return Batching(*(max(1, number // by) for number in numbers))


BATCHING = {"cpu": Batching(), "cuda": Batching(256, 8192, 2048)}
"""What settings of 0 mean on a device with enough memory. On a GPU, a step of up to some hundreds of tokens takes
as long as reading the weights. On a CPU every token costs nearly as much as the first."""

MIXED_CHUNK_SIZE = 512
"""The largest default of `chunk_size` with `prefill_policy="mixed"`. The decodes in the same step read the weights
anyway, so larger chunks would only delay them."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. 0 for `max_model_len`, `num_pages` or `num_threads` selects a default. 0 for
    `max_num_seqs`, `max_num_batched_tokens` or `chunk_size` selects a default that depends on the device and its
    memory (`BATCHING`, `decided`).

    `model`: a folder in Hugging Face format, a hub id, or a model that ships with the project: "petiole-tiny",
    "petiole-tiny-tools", "petiole-tiny-embed" or "petiole-tiny-vision".
    `max_num_batched_tokens`: maximum prompt tokens in one prefill step.
    `chunk_size`: maximum tokens of one prompt in a step; bounds how long a prefill delays running sequences.
    `num_pages`: pages of `page_size` tokens, including the reserved page 0.
    `delay_factor`: let the waiting queue grow for this fraction of the last prefill's duration.
    `batch_step_budget`: how many times as long the lowest priority may make a step in which more urgent requests
    generate; at least 1.
    `stream_interval_ms`: after a request's first token, tokens within this interval are delivered as one delta.
    `user_control_tokens`: what a control token is that is written out in the content of users and tools.
    `image_max_bytes`: maximum size of an image's file; `image_max_pixels`: of the picture in the file.
    `max_waiting`: maximum waiting requests; more are refused with EngineBusy.

    Settings that allocate memory are also checked against the free memory when the model is loaded.
    """

    model: str = "petiole-tiny"
    revision: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weight_quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    head_quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    activation_quantization: Literal["none", "int8"] = "none"
    snapshot_quantization: Literal["none", "int8"] = "none"
    kv_dtype: Literal["auto", "fp8"] = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    chunk_size: int = 0
    num_pages: int = 0
    page_size: int = 1
    gpu_memory_utilization: float = 0.9
    prefix_cache: Literal["radix", "block", "off"] = "radix"
    prefix_cache_max_pages: int | None = None
    pipeline: Literal["on", "off"] = "on"
    prefill_policy: Literal["drain", "pipelined", "mixed"] = "pipelined"
    reserve: Literal["demand", "full"] = "demand"
    delay_factor: float = 0.0
    stream_interval_ms: float = 0.0
    batch_step_budget: Literal["off"] | float = "off"
    speculative_tokens: int = 0
    lora_slots: int = 0
    lora_max_rank: int = 64
    cuda_graphs: Literal["on", "off"] = "on"
    graph_batch_sizes: tuple[int, ...] = ()
    user_control_tokens: Literal["text", "token"] = "text"
    image_max_bytes: int = 20 * 2**20
    image_max_pixels: int = 50_000_000
    max_waiting: int = 10_000
    num_threads: int = 0
    debug: bool = False

    def __post_init__(self) -> None:
        for name in SWITCHES:
            switch(name)
        require(self.max_waiting >= 1, "max_waiting", "must be at least 1", self.max_waiting)
        for name in ("page_size", "lora_max_rank", "image_max_bytes", "image_max_pixels"):
            require(1 <= getattr(self, name) <= _INT32, name, f"must be 1 to {_INT32}", getattr(self, name))
        for name in ("max_num_seqs", "max_num_batched_tokens", "chunk_size", "lora_slots"):
            require(0 <= getattr(self, name) <= _INT32, name, f"must be 0 to {_INT32}", getattr(self, name))
        for name, most in (("speculative_tokens", 1024), ("num_threads", 1024)):
            require(0 <= getattr(self, name) <= most, name, f"must be 0 to {most}", getattr(self, name))
        for name in ("max_model_len", "num_pages"):  # at least a prompt and an output token; page 0 and one more
            value, limit = getattr(self, name), f"must be 0, or 2 to {_INT32}"
            require(value == 0 or 2 <= value <= _INT32, name, limit, value)
        sizes = self.graph_batch_sizes
        require(all(size >= 1 for size in sizes), "graph_batch_sizes", "must each be at least 1", sizes)
        require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            "must be above 0 and at most 1",
            self.gpu_memory_utilization,
        )
        for name in ("delay_factor", "stream_interval_ms"):
            require(0 <= getattr(self, name) <= 1e6, name, "must be 0 to 1000000", getattr(self, name))
        factor, drains = self.step_factor, self.prefill_policy == "drain"
        if factor is not None:
            require(1 <= factor <= 1e6, "batch_step_budget", "must be off, or 1 to 1000000", factor)
            require(not drains, "batch_step_budget", "must be off with prefill_policy=drain", factor)
        if self.prefix_cache == "radix":
            require(
                self.page_size == 1,
                "page_size",
                "must be 1 with prefix_cache=radix (PETIOLE_PREFIX_CACHE)",
                self.page_size,
            )
        if self.prefix_cache == "block":
            valid = self.page_size == 1 or self.page_size % 16 == 0
            require(
                valid,
                "page_size",
                "must be 1 or a multiple of 16 with prefix_cache=block (PETIOLE_PREFIX_CACHE)",
                self.page_size,
            )

    @property
    def step_factor(self) -> float | None:
        """`batch_step_budget`, None if it is off."""
        return None if self.batch_step_budget == "off" else float(self.batch_step_budget)

    @property
    def mixes(self) -> bool:
        """Whether steps may hold decodes and chunks of prompts."""
        return self.prefill_policy == "mixed" or self.step_factor is not None

    def decided(self, defaults: Batching, largest_region: int = 0) -> EngineConfig:
        """The same settings with these defaults in place of 0. Mixed steps are short: see `MIXED_CHUNK_SIZE`.

        `largest_region`: tokens that a chunk must hold whole."""
        chunk_size = defaults.chunk_size
        if self.prefill_policy == "mixed":
            chunk_size = min(chunk_size, MIXED_CHUNK_SIZE)
        return replace(
            self,
            max_num_seqs=self.max_num_seqs or defaults.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or defaults.max_num_batched_tokens,
            chunk_size=self.chunk_size or max(chunk_size, largest_region),
        )

    def whole_texts(self, longest: int) -> EngineConfig:
        """The same settings for texts that are computed whole, of up to `longest` tokens: a step holds the
        longest. Texts take no pages, whatever `num_pages` is, and no prefix is kept."""
        steps = {name: getattr(self, name) for name in ("max_num_batched_tokens", "chunk_size")}
        for name, given in steps.items():
            limit = f"must be at least {longest}, or 0: this model computes each text in one step"
            require(given == 0 or given >= longest, name, limit, given)
        batched = self.max_num_batched_tokens or max(BATCHING["cpu"].max_num_batched_tokens, longest)
        return replace(
            self,
            prefix_cache="off",
            num_pages=0,
            max_num_batched_tokens=batched,
            chunk_size=self.chunk_size or batched,
        )

    @property
    def longest_step(self) -> int:
        """The most positions that a step computes of one sequence."""
        return max(self.chunk_size, 1 + self.speculative_tokens)

    @property
    def batching(self) -> Batching:
        return Batching(self.max_num_seqs, self.max_num_batched_tokens, self.chunk_size)
