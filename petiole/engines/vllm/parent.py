"""vLLM as an engine: its child computes, all else is what `Serving` has."""

from __future__ import annotations

import hashlib
import itertools
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any

from petiole.contract.settings.engine import Batching, EngineConfig
from petiole.engines.vllm import wording
from petiole.engines.vllm.child import Child
from petiole.engines.vllm.sequences import VllmLoop, VllmSequences
from petiole.gpu_worker import constraints
from petiole.gpu_worker.constraints.grammar import GrammarState, vocabulary_of
from petiole.gpu_worker.engine.open_requests import OpenRequests
from petiole.gpu_worker.engine.serving import Serving
from petiole.gpu_worker.exceptions import (
    AdapterError,
    EngineClosed,
    EngineError,
    InvalidRequest,
    ModelError,
    require,
)
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.preparation.embeddings import TextInputs
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.preparation.preparation import Preparer
from petiole.gpu_worker.request import Constraint, Request
from petiole.gpu_worker.request.prepared_images import ImageLimits
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.runtime.interface import Computing, ModelLimits
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.speculation import NgramProposer
from petiole.gpu_worker.text import Tokenizer, load_tokenizer

_HERE = ("drafts", "kv_tier", "speculative_tokens", "weight_quantization")
"""Settings of Petiole's engine that would change answers or promises, and that vLLM has under names of its own."""


class VllmEngine(Serving[VllmLoop]):
    """Serves requests with vLLM. The constructor starts the child, and returns when it has loaded the model.
    Raises InvalidRequest for settings, ModelError if vLLM does not start."""

    def __init__(self, config: EngineConfig) -> None:
        require(config.vllm_python != "", "vllm_python", "must be an interpreter that has vLLM", "")
        for name in _HERE:
            given, default = getattr(config, name), EngineConfig.__dataclass_fields__[name].default
            fits = given == default or (name, given) == ("drafts", "off")
            require(fits, name, f"must be {default!r} with vLLM: use PETIOLE_VLLM_ARGS", given)
        folder = resolve_model(config.model, config.revision)
        self.tokenizer = tokenizer = load_tokenizer(folder)
        self._figures: dict[str, float] = {}
        self._done: dict[int, Future[None]] = {}
        self._numbers = itertools.count(1)
        self._adapters: dict[str, tuple[str, int, str]] = {}
        self._hashed: dict[Path, tuple[list[tuple[str, int, int]], str]] = {}
        self._adapter_lock, self._adapter_numbers = threading.Lock(), itertools.count(1)
        arguments = arguments_of(config, folder)
        self.child = Child(config.vllm_python, self._hear)
        try:
            self._loaded(config, folder, tokenizer, self.child.start(arguments, config.vllm_start_s))
        except BaseException:
            self.child.close(kindly=False)
            raise

    def _loaded(self, config: EngineConfig, folder: Path, tokenizer: Tokenizer, ready: dict[str, Any]) -> None:
        """The child has loaded the model: `ready` is what it says of it."""
        self._limits = limits_of(config.model, fingerprint(folder, ready), ready)
        self._version = ready["version"]
        batched = ready["max_num_batched_tokens"]
        self.config = config = config.decided(Batching(ready["max_num_seqs"], batched, batched))
        self.sequences = VllmSequences(self.child.say, self._adapter_of, self._limits)
        preparer = _Preparer(
            config,
            self._limits,
            tokenizer=tokenizer,
            compile_constraint=partial(_compiled, tokenizer=tokenizer),
            proposer=NgramProposer(),
            adapter_key=self._adapter_key,
        )
        self.paused = False
        make_loop = partial(VllmLoop, self.sequences)
        self.serve(OpenRequests(config, self, preparer, self, make_loop, self._on_fatal))
        self.child.serve(config.vllm_silence_s, self._requests.fail)

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    def _close(self) -> None:
        self.child.close()

    def _on_fatal(self, error: BaseException) -> None:
        self.child.close(kindly=False)
        super()._on_fatal(error)

    # ------------------------------------------------------------ on the child's reading thread

    def _hear(self, message: dict[str, Any]) -> None:
        if (outputs := message.get("outputs")) is not None:
            self._loop.post(lambda: self.sequences.receive(outputs))
        elif (figures := message.get("alive")) is not None:
            self._figures = figures
        elif (done := self._done.pop(message.get("done", 0), None)) is not None:
            if error := message["error"]:
                done.set_exception(EngineError(f"vLLM failed: {error}"))
            else:
                done.set_result(None)

    # ------------------------------------------------------------ adapters, on preparation threads

    def adapter_at_hand(self, adapter: str) -> bool:
        return False

    def _adapter_key(self, adapter: str) -> str:
        """A key of the adapter's content, for which vLLM gets a number. Raises AdapterError."""
        try:
            folder = resolve_model(adapter)
            files = sorted(path for path in folder.iterdir() if path.name.startswith("adapter_"))
            key = self._hash_of(folder, files)
        except (ModelError, OSError) as error:
            raise AdapterError(f"adapter {adapter}: {error}") from error
        if not files:
            raise AdapterError(f"adapter {adapter}: {folder} has no adapter_config.json")
        with self._adapter_lock:
            known = self._adapters.get(key)
            self._adapters[key] = (key, known[1] if known else next(self._adapter_numbers), str(folder))
        return key

    def _hash_of(self, folder: Path, files: list[Path]) -> str:
        """The hash of an adapter's files, which are read again once their sizes or times have changed."""
        stamps = [(path.name, status.st_size, status.st_mtime_ns) for path in files for status in [path.stat()]]
        before, key = self._hashed.get(folder, (None, ""))
        if stamps != before:
            digest = hashlib.sha256()
            for path in files:
                with path.open("rb") as file:
                    digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
            key = digest.hexdigest()[:16]
            self._hashed[folder] = stamps, key
        return key

    def _adapter_of(self, seq: ScheduledSequence) -> tuple[str, int, str] | None:
        return None if seq.request.adapter is None else self._adapters[str(seq.adapter_key)]

    # ------------------------------------------------------------ control

    def pause(self) -> None:
        """Schedule nothing; requests in vLLM wait. Returns when vLLM has confirmed it."""
        self._ask("pause")
        self.paused = True

    def resume(self) -> None:
        self._ask("resume")
        self.paused = False

    def _ask(self, command: str) -> None:
        n = next(self._numbers)
        done = self._done[n] = Future()
        self.child.say(do=command, n=n)
        while not wait([done], timeout=0.5).done:
            if not self._thread.is_alive():
                raise EngineClosed("the engine has stopped")
        done.result()

    def prepare_reload(self, model: str) -> Callable[[], None]:
        """Always refused: raises ModelError."""
        raise ModelError(f"vLLM keeps its weights while it runs: start a worker with PETIOLE_MODEL={model}")

    # ------------------------------------------------------------ status

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"engine": f"vllm {self._version}"}

    def heartbeat_age_s(self) -> float:
        """Seconds since the child's last sign of life; 0 while the engine is closed."""
        return 0.0 if self._requests.closed else max(0.0, time.monotonic() - self.child.heard_at)

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        return ()

    def stats(self) -> dict[str, float | int | str]:
        limits, counters, figures = self._limits, self.sequences.counters, self._figures
        pages, running = limits.n_pages - 1, int(figures.get("running", 0))
        computed = counters.prompt_tokens + self.sequences.hits
        return {
            "model": limits.model,
            "device": limits.device,
            "weight_format": limits.computing.weight_format,
            "kernels": limits.computing.kernels,
            "healthy": int(self.healthy),
            "paused": int(self.paused),
            "slots": self.config.max_num_seqs,
            "open": len(self._requests.open),
            "running": running,
            "waiting": int(figures.get("waiting", 0)),
            "pages_total": pages,
            "pages_free": round(pages * (1 - figures.get("kv_usage", 0.0))),
            "prompt_tokens": counters.prompt_tokens,
            "generated_tokens": counters.generated_tokens,
            "finished": counters.finished,
            "prefix_hit_tokens": self.sequences.hits,
            "prefix_hit_rate": round(self.sequences.hits / computed, 4) if computed else 0.0,
        }


class _Preparer(Preparer):
    """Refuses what vLLM lacks."""

    def prepare(self, output: RequestOutput, arrival: int, arrival_s: float) -> ScheduledSequence:
        seq = super().prepare(output, arrival, arrival_s)
        wording.checked(seq)
        return seq

    def texts(self, request: Request) -> TextInputs:
        """Always refused: raises InvalidRequest."""
        field = "texts" if request.scoring is None else request.scoring.field
        raise InvalidRequest(field, "needs PETIOLE_ENGINE=petiole", "some")

    def _with_budget(self, constraint: Constraint, value: Mapping[str, Any], most: int, call: int) -> Constraint:
        return constraint  # as the caller gave it: a budget is not a part of a grammar

    def _consume(self, state: ConstraintState, token: int, numbers: Numbers) -> bool:
        """vLLM looks for banned words in what follows a resumption alone, so a word may stand across it."""
        inner = wording.grammar_of(state)
        return inner is None or super()._consume(inner, token, numbers)


def _compiled(constraint: Constraint, tokenizer: Tokenizer) -> ConstraintState:
    """A constraint in vLLM's words: we follow what vLLM is told."""
    state = constraints.compile_constraint(constraint, tokenizer)
    if not isinstance(state, GrammarState):
        return state
    source, field = wording.lark_of(state.source), f"constraint.{constraint.kind}"
    return vocabulary_of(tokenizer).grammar(source, field, constraint.value).start()


def arguments_of(config: EngineConfig, folder: Path) -> list[str]:
    """vLLM's own arguments. Those of PETIOLE_VLLM_ARGS come last, and so hold."""
    given = {
        "--model": str(folder),
        "--served-model-name": config.model,
        "--dtype": config.dtype,
        "--max-model-len": config.max_model_len or None,
        "--max-num-seqs": config.max_num_seqs or None,
        "--max-num-batched-tokens": config.max_num_batched_tokens or None,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--max-logprobs": wording.MOST_LOGPROBS,
        "--scheduling-policy": "priority",
        "--structured-outputs-config.backend": "guidance",
        "--generation-config": "vllm",
    }
    if config.lora_slots:
        given |= {"--max-loras": config.lora_slots, "--max-lora-rank": config.lora_max_rank}
    found = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    lora = ["--enable-lora"] if config.lora_slots else []
    prefix = ["--no-enable-prefix-caching"] if config.prefix_cache == "off" else []
    try:
        given_last = shlex.split(config.vllm_args)
    except ValueError as error:
        limit = f"must be arguments as a shell reads them ({error})"
        raise InvalidRequest("vllm_args", limit, config.vllm_args) from None
    for name in (part.partition("=")[0] for part in given_last):
        limit = f"must not have {name}: PETIOLE_MODEL names the model"
        require(name not in _OF_THE_MODEL, "vllm_args", limit, config.vllm_args)
    return [*found, *lora, *prefix, *given_last]


def limits_of(model: str, content: str, ready: dict[str, Any]) -> ModelLimits:
    """vLLM starts only if a sequence of `max_model_len` fits into its cache, whatever its groups of layers are."""
    size, longest, mark = ready["block_size"], ready["max_model_len"], ready["image_token"]
    pages = max(ready["blocks"] or 0, -(-longest // size))
    return ModelLimits(
        model=model,
        fingerprint=content,
        vocab_size=ready["vocab_size"],
        max_model_len=longest,
        n_pages=pages + 1,
        page_size=size,
        max_batch_size=ready["max_num_seqs"] + 1,
        eos_token_ids=frozenset(ready["eos"]),
        images=ImageLimits(_MOST_IMAGES, 1, 1, False, placeholder=mark) if mark is not None else None,
        pictures=wording.Files() if mark is not None else None,
        device=ready["device"],
        computing=Computing(ready["quantization"] or ready["dtype"], kernels=f"vllm {ready['version']}"),
    )


_OF_THE_MODEL = ("--model", "--revision", "--tokenizer", "--tokenizer-revision")
"""Petiole reads the tokenizer, too."""
_MOST_IMAGES = 64
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_CONTENT = {".safetensors", ".bin", ".pt", ".gguf"}


def fingerprint(folder: Path, ready: dict[str, Any]) -> str:
    """A hash of a model's files, sampled, and of what else answers depend on. Another engine has other hashes, so
    it never continues what this one began. It takes files that Petiole's loader does not read."""
    digest = hashlib.sha256(f"vllm {ready['dtype']} {ready['quantization']} {ready['overrides']}".encode())
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _CONTENT or path.name == "config.json"]
    for path in files or [folder]:  # a GGUF file
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}".encode())
        with path.open("rb") as file:
            for k in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * k // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
