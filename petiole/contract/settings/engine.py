"""The engine's settings and the switches of a process, each declared once: type, limits, default, meaning.

`tasks.settings` reads the settings from the environment by the same declaration, `petiole settings` and
docs/settings.md list them from it, and `EngineConfig` refuses values outside of their limits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BeforeValidator

from petiole.contract.errors import require

logger = logging.getLogger(__name__)


class Switch(NamedTuple):
    """An environment variable that holds for the whole process, whichever engine runs in it.

    `values`: the default first."""

    values: tuple[str, ...]
    meaning: str


SWITCHES = {
    "native": Switch(("on", "off"), "`off`: torch alone computes on a CPU"),
    "tiles": Switch(("on", "off"), "`off`: Petiole's kernels do without [AMX](runtime.md#amx)"),
    "exact": Switch(
        ("auto", "on", "off"),
        "`off`: speed decides alone how CUDA computes [delta nets](cache.md#layers-with-a-state)",
    ),
    "untimed": Switch(
        ("off", "on", "split", "codes", "rows", "chunks"),
        "[CUDA kernels that no card has timed](runtime.md#untimed-kernels) compute, too: all of them, or these",
    ),
    "progress": Switch(("on", "off"), "`off`: no progress bar while `Engine(...)` loads on a terminal"),
}
"""By name: `PETIOLE_NATIVE` and so on."""
_SPELLINGS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}


def switch(name: str) -> str:
    """The value of a switch now. Raises InvalidRequest if the switch has no such value."""
    given = os.environ.get(f"PETIOLE_{name.upper()}", "")
    values = SWITCHES[name].values
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


_INT32 = 2**31 - 1  # page tables and row indices are int32
_Default = TypeVar("_Default")


@dataclass(frozen=True, slots=True)
class UnlessZero:
    """In a type: the least value beside 0, which selects a default."""

    least: int


def _factor(value: object) -> object:
    with suppress(TypeError, ValueError):
        if value == "off" or 1 <= float(value) <= 1e6:  # type: ignore[arg-type]
            return value
    raise ValueError("must be off, or a number from 1 to 1000000")


def _whole_numbers(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return tuple(int(part) for part in value.split(",") if part.strip())
    except ValueError:
        raise ValueError("must be whole numbers, such as 1,2,4,8") from None


Count = Annotated[int, Ge(0), Le(_INT32)]
Positive = Annotated[int, Ge(1), Le(_INT32)]
OfTwo = Annotated[Count, UnlessZero(2)]
Few = Annotated[int, Ge(0), Le(1024)]
Several = Annotated[int, Ge(2), Le(1024)]
Share = Annotated[float, Gt(0), Le(1)]
Gibibytes = Annotated[float, Gt(0), Le(1e6)]
Million = Annotated[float, Ge(0), Le(1e6)]
Seconds = Annotated[float, Gt(0), Le(1e6)]
Factor = Annotated[Literal["off"] | float, BeforeValidator(_factor)]
Sizes = Annotated[tuple[int, ...], BeforeValidator(_whole_numbers)]
"""The last two also say how they are read from text."""


def setting(default: _Default, meaning: str) -> _Default:
    """A field of `EngineSettings`. The type is the annotation's, with its limits; `meaning` is for the docs."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings that the environment of a worker may give to its engine. 0 for a number of tokens, sequences,
    pages or threads selects a default."""

    model: Annotated[str, MinLen(1)] = setting(
        "petiole-tiny", "a folder in Hugging Face format, a hub id, or petiole-tiny"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", "dtype of the weights")
    weight_quantization: Literal["none", "int8", "int4", "fp8"] = setting("none", "quantize weights when loading")
    head_quantization: Literal["auto", "none", "int8", "int4"] = setting(
        "auto", "quantize the output head when loading; auto: in int8 if the weights are, too"
    )
    activation_quantization: Literal["none", "int8"] = setting(
        "none", "inputs of layers with four-bit weights in eight bits: quicker on CPUs, not exact"
    )
    snapshot_quantization: Literal["none", "int8"] = setting(
        "none", "copies of states in eight bits: more of them, not exact; needs PETIOLE_EXACT=off"
    )
    kv_dtype: Literal["auto", "fp8"] = setting(
        "auto", "dtype of the KV cache; fp8 takes half the memory of 16 bits"
    )
    max_model_len: OfTwo = setting(0, "longest prompt plus output, in tokens; 0: the model's")
    max_num_seqs: Count = setting(0, "requests that generate at the same time; 0: 64, on CUDA up to 256")
    max_num_batched_tokens: Count = setting(0, "prompt tokens of one prefill step; 0: 2,048, on CUDA up to 8,192")
    chunk_size: Count = setting(0, "prompt tokens of one request in one step; 0: 512, on CUDA up to 2,048")
    num_pages: OfTwo = setting(0, "pages of the KV cache; 0: what the memory holds")
    page_size: Positive = setting(1, "tokens in a page of the KV cache; 1 with prefix_cache radix")
    gpu_memory_utilization: Share = setting(0.9, "share of the GPU's memory to use")
    prefix_cache: Literal["radix", "block", "off"] = setting("radix", "how prompts share their beginnings")
    prefix_cache_max_pages: Count | None = setting(None, "pages that the prefix cache may keep")
    kv_tier: str = setting(
        "", "folder for a machine's [tier of KV](cache.md#a-tier-on-the-machine), such as /dev/shm/petiole"
    )
    kv_tier_gib: Gibibytes = setting(16.0, "most that the files in `kv_tier` take")
    kv_tier_salted: bool = setting(False, "`kv_tier` also keeps the KV of requests with a salt")
    pipeline: Literal["on", "off"] = setting("on", "plan the next step while the device computes")
    prefill_policy: Literal["drain", "pipelined", "mixed"] = setting(
        "pipelined", "prompts wait until the pipeline is empty, go between decodes, or in the same steps"
    )
    reserve: Literal["demand", "full"] = setting("demand", "take pages as needed, or all at admission")
    batch_step_budget: Factor = setting(
        "off", "how many times as long the lowest priority may make a more urgent step; off: no limit"
    )
    speculative_tokens: Few = setting(0, "most drafted tokens in a step; 0: off")
    drafts: Literal["auto", "ngram", "mtp", "off"] = setting(
        "auto",
        "who drafts: earlier places in the text, the model's head (at most 4 tokens), or nobody; auto: the head, "
        "if there is one",
    )
    lora_slots: Count = setting(0, "LoRA adapters held on the device; 0: none are served")
    lora_max_rank: Positive = setting(64, "largest rank of a LoRA adapter")
    cuda_graphs: Literal["on", "off"] = setting(
        "on", "replay steps as CUDA graphs; off: launch their kernels one by one"
    )
    graph_batch_sizes: Sizes = setting(
        (), "sizes of decode batches with a CUDA graph, such as 1,2,4,8; empty: chosen"
    )
    user_control_tokens: Literal["text", "token"] = setting(
        "text", "what control tokens become that users and tools write out"
    )
    image_max_bytes: Positive = setting(20 * 2**20, "largest file of an image")
    image_max_pixels: Positive = setting(50_000_000, "most pixels of an image")
    image_tokens: Positive = setting(4096, "most tokens of an image: a larger one is made smaller (not Moondream)")
    image_cache_bytes: Count = setting(256 * 2**20, "bytes of encoded images that are kept; 0: none")
    video_max_bytes: Positive = setting(64 * 2**20, "largest file of a video")
    video_seconds: Positive = setting(600, "longest video")
    video_frames: Several = setting(64, "most frames of a video: of a longer file fewer to a second are taken")
    video_tokens: Positive = setting(8192, "most tokens of a video: larger frames are made smaller")
    num_threads: Few = setting(0, "CPU threads of the model; 0: one for each core that the process may use")
    vllm_python: str = setting("", "interpreter with vLLM")
    vllm_args: str = setting("", "vLLM's own [arguments](engines.md)")
    vllm_start_s: Seconds = setting(1800.0, "longest start of vLLM")
    vllm_silence_s: Seconds = setting(120.0, "longest silence of vLLM")
    debug: bool = setting(False, "check every invariant at every step")


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """Settings of one engine. Raises InvalidRequest if one is outside of its limits.

    0 for `max_num_seqs`, `max_num_batched_tokens` or `chunk_size` selects a default that depends on the device and
    its memory (`BATCHING`, `decided`). `model` may be each model that ships with the project: "petiole-tiny",
    "petiole-tiny-tools", "petiole-tiny-embed" or "petiole-tiny-vision". `num_pages` counts the reserved page 0.
    Settings that allocate memory are also checked against the free memory when the model is loaded.
    """

    stream_interval_ms: Million = setting(0.0, "pause between deltas of a stream, after the first")
    max_waiting: Annotated[int, Ge(1)] = setting(10_000, "waiting requests; more are refused with EngineBusy")

    def __post_init__(self) -> None:
        for name in SWITCHES:
            switch(name)
        for name, (holds, limit) in _limits().items():
            value = getattr(self, name)
            require(holds(value), name, limit, value)
        sizes = self.graph_batch_sizes
        require(all(size >= 1 for size in sizes), "graph_batch_sizes", "must each be at least 1", sizes)
        factor, drains = self.step_factor, self.prefill_policy == "drain"
        if factor is not None:
            require(1 <= factor <= 1e6, "batch_step_budget", "must be off, or 1 to 1000000", factor)
            require(not drains, "batch_step_budget", "must be off with prefill_policy=drain", factor)
        fits = {
            "radix": (self.page_size == 1, "must be 1"),
            "block": (self.page_size == 1 or self.page_size % 16 == 0, "must be 1 or a multiple of 16"),
        }
        if self.prefix_cache in fits:
            fit, limit = fits[self.prefix_cache]
            limit = f"{limit} with prefix_cache={self.prefix_cache} (PETIOLE_PREFIX_CACHE)"
            require(fit, "page_size", limit, self.page_size)
        if self.drafts == "off" and self.speculative_tokens:
            logger.info("speculative_tokens=%d changes nothing with drafts=off", self.speculative_tokens)
            object.__setattr__(self, "speculative_tokens", 0)

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

    def drafting_by(self, head: int) -> EngineConfig:
        """The same settings for a model whose head drafts so many tokens a step; 0: it has none."""
        return replace(self, speculative_tokens=min(self.speculative_tokens, head)) if head else self

    @property
    def longest_step(self) -> int:
        """The most positions of one sequence that a step may write: a chunk, or a token with its drafts, which
        begins before or behind the drafts in flight."""
        return max(self.chunk_size, 1 + 2 * self.speculative_tokens)

    @property
    def batching(self) -> Batching:
        return Batching(self.max_num_seqs, self.max_num_batched_tokens, self.chunk_size)


@cache
def _limits() -> dict[str, tuple[Callable[[Any], bool], str]]:
    """By setting with limits: whether a value is within them, and the limits in words."""
    hints = get_type_hints(EngineConfig, include_extras=True)
    found = {name: _limit(hint) for name, hint in hints.items()}
    return {name: limit for name, limit in found.items() if limit}


def _limit(hint: Any) -> tuple[Callable[[Any], bool], str] | None:
    if NoneType in get_args(hint):
        limit = _limit(get_args(hint)[0])
        return limit and (lambda value: value is None or limit[0](value), limit[1])
    of = {type(extra): extra for extra in getattr(hint, "__metadata__", ())}
    match of.get(UnlessZero), of.get(Ge) or of.get(Gt) or of.get(MinLen), of.get(Le):
        case UnlessZero(least=least), _, Le(le=most):
            return lambda value: value == 0 or least <= value <= most, f"must be 0, or {least} to {most}"
        case None, Ge(ge=least), Le(le=most):
            return lambda value: least <= value <= most, f"must be {least} to {most:.15g}"
        case None, Gt(gt=bound), Le(le=most):
            return lambda value: bound < value <= most, f"must be above {bound} and at most {most}"
        case None, Ge(ge=least), None:
            return lambda value: value >= least, f"must be at least {least}"
        case None, MinLen(min_length=1), None:
            return bool, "must have at least 1 character"
    return None
