"""ModelRuntime: a decoder, its KV pool and its sampler behind the `Runtime` protocol.

A launch prepares the step's arrays on the engine thread and enqueues its computation on the one compute stream.
The enqueued work reads no shared host state. Prefill, decode and verify steps differ only in their arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.config import BATCHING, EngineConfig
from petiole.gpu_worker.errors import AdapterError, ModelError
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.adapters.store import AdapterStore
from petiole.gpu_worker.models.checkpoint.loading import TensorSource
from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import CropDecoder, Decoder
from petiole.gpu_worker.request.images import PreparedImage
from petiole.gpu_worker.request.values import N_BINS
from petiole.gpu_worker.runtime.cpu.executor import CpuExecutor
from petiole.gpu_worker.runtime.cpu.executor import choose as choose_on_cpu
from petiole.gpu_worker.runtime.cuda.attention.installed import kernels_at_hand
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture, eager
from petiole.gpu_worker.runtime.cuda.executor import (
    CudaExecutor,
    batching_that_fits,
    working_bytes,
)
from petiole.gpu_worker.runtime.cuda.executor import accept as accept_on_cuda
from petiole.gpu_worker.runtime.cuda.executor import choose as choose_on_cuda
from petiole.gpu_worker.runtime.derived import max_model_len, n_threads, require_adapters
from petiole.gpu_worker.runtime.device.cuda import CudaStream
from petiole.gpu_worker.runtime.device.interface import Device, upload, upload_together
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.device.slots import DecodeSlot, check_shared_stream
from petiole.gpu_worker.runtime.device.transfer import RenderBuffer
from petiole.gpu_worker.runtime.interface import (
    EncodeInput,
    Load,
    ModelLimits,
    Progress,
    StepBatch,
    TokenMask,
    Transfer,
    nothing,
)
from petiole.gpu_worker.runtime.memory.kv import KVCache, decide_n_pages, free_bytes, new_kv_cache
from petiole.gpu_worker.runtime.memory.room import require_rows_and_adapters
from petiole.gpu_worker.runtime.reading import ModelInfo, ModelReader
from petiole.gpu_worker.runtime.step.inputs import ImageInputs, StepInputs, StepStates, lay_out
from petiole.gpu_worker.runtime.step.outputs import OutputSampler
from petiole.gpu_worker.runtime.step.rows import OutputPlan, RowStates, write_rows
from petiole.gpu_worker.runtime.step.verify import accept

N_SLOTS = 2


class Executor(Protocol):
    """Runs the model on one kind of device. Called in stream order."""

    def forward(self, slot_id: int, inputs: StepInputs, images: ImageInputs = ()) -> StepStates:
        """Compute all positions and write their KV to the pool."""
        ...

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        """The features of each image (see `ImageDecoder`)."""
        ...


class _NoWeights:
    """The executor while weights are being replaced. If that fails, it stays, and every step raises ModelError."""

    def forward(self, slot_id: int, inputs: StepInputs, images: ImageInputs = ()) -> StepStates:
        raise self._lost

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        raise self._lost

    @property
    def _lost(self) -> ModelError:
        return ModelError("the weights were lost because a reload failed; start a new engine")


@dataclass(slots=True)
class Staging:
    """The data of the step that uses a slot.

    `sources`: outputs of sampling on the device. Kept until the slot is reused, because the copy stream reads
    them.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    states: StepStates | None = None
    plan: OutputPlan | None = None


class ModelRuntime:
    """The `Runtime` that computes a real model (see `gpu_worker.runtime.interface`)."""

    def __init__(
        self, config: EngineConfig, *, device: Device | None = None, source: TensorSource | None = None
    ) -> None:
        """`source`: see `ModelReader`."""
        self.config = config
        self.progress: Progress = nothing
        self._device = device or open_device(config.device)
        self._torch_device = torch.device("cuda", 0) if self._device.kind == "cuda" else torch.device("cpu")
        if (threads := n_threads(config)) != torch.get_num_threads():
            torch.set_num_threads(threads)
        with torch.no_grad():  # not inference mode: buffers are also written by copies outside it
            self._reader = ModelReader(config, source, self._torch_device)
            self._info = self._reader.find(config.model)
            require_adapters(config, self._info.architecture.adapters, self._info.config)
            self._decoder: Decoder = self._reader.read(self._info)
            self.config = config = self._decided(config)
            self._stream = self._device.new_stream("compute")
            on_cuda = self._device.kind == "cuda"  # on a CPU, copies need no thread of their own
            self._copy_stream = self._device.new_stream("copy") if on_cuda else self._stream
            self._require_room()
            self._n_rows = config.max_num_seqs + 1
            self._bank = self._new_bank() if config.lora_slots else None
            self._adapters = self._new_adapters()
            place, vocab_size = self._torch_device, self._info.config.vocab_size
            self._states = RowStates(self._n_rows, vocab_size, place, self._n_bins)
            kernels = (choose_on_cuda, accept_on_cuda) if on_cuda else (choose_on_cpu, accept)
            self._sampler = OutputSampler(self._states, lambda arrays: upload_together(arrays, place), *kernels)
            self._features: dict[int, Tensor] = {}  # of encoded images, by key; used in stream order
            self._slots = tuple(self._new_slot(slot_id) for slot_id in range(N_SLOTS))
            check_shared_stream(self._slots)
            self._cache = self._new_cache()
            self._device.synchronize()  # tensors created on other streams are complete
            self._executor: Executor = self._new_executor(nothing)

    @property
    def _model_config(self) -> ModelConfig:
        return self._info.config

    @property
    def _max_model_len(self) -> int:
        return max_model_len(self.config, self._info.config)

    # -- construction

    def _decided(self, config: EngineConfig) -> EngineConfig:
        """The configuration with the device's numbers in place of 0. On CUDA they are small enough that the
        working memory takes only a part of the free memory."""
        defaults, images = BATCHING[self._device.kind], self._decoder.images
        region = images.max_region if images else 0
        if self._device.kind == "cpu":
            return config.decided(defaults, region)
        self._release_memory()
        free = free_bytes(self._torch_device, config.gpu_memory_utilization)
        itemsize = self._decoder.dtype.itemsize
        model, encode = self._model_config, self._encode_bytes
        return batching_that_fits(config, defaults, model, itemsize, free, encode, region)

    @property
    def _encode_bytes(self) -> int:
        images = self._decoder.images
        return cast(CropDecoder, self._decoder).encode_bytes(images.max_crops) if images else 0

    def _new_bank(self) -> AdapterBank:
        slots, rank, dtype = self.config.lora_slots, self.config.lora_max_rank, self._decoder.dtype
        return AdapterBank(self._model_config, slots, rank, dtype, self._torch_device)

    def _new_adapters(self) -> AdapterStore:
        config, dtype, pinned = self.config, self._decoder.dtype, self._torch_device.type == "cuda"
        kept = 2 * config.lora_slots
        return AdapterStore(self._model_config, config.lora_max_rank, kept=kept, dtype=dtype, pinned=pinned)

    def _new_cache(self) -> KVCache:
        config, model, device = self.config, self._model_config, self._torch_device
        dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else self._decoder.dtype
        n_pages = decide_n_pages(
            config,
            model,
            max_model_len=self._max_model_len,
            bytes_per_element=dtype.itemsize,
            free_bytes=self._free_bytes(),
            on_cuda=device.type == "cuda",
        )
        return new_kv_cache(
            model,
            n_pages=n_pages,
            page_size=config.page_size,
            rows=self._n_rows,
            max_model_len=self._max_model_len,
            dtype=dtype,
            device=device,
        )

    def _require_room(self) -> None:
        """Check that rows and adapters fit into the free memory; on a CPU, half of it, which others share."""
        free = free_bytes(self._torch_device, self.config.gpu_memory_utilization)
        require_rows_and_adapters(
            self.config,
            self._model_config,
            max_model_len=self._max_model_len,
            bytes_per_element=self._decoder.dtype.itemsize,
            room=free if self._torch_device.type == "cuda" else free // 2,
        )

    def _free_bytes(self) -> int:
        self._release_memory()  # temporary tensors of the weight conversion
        free = free_bytes(self._torch_device, self.config.gpu_memory_utilization)
        if self._torch_device.type == "cpu":
            return free
        itemsize = self._decoder.dtype.itemsize
        return free - working_bytes(self.config, self._model_config, itemsize, self._encode_bytes)

    def _new_executor(self, progress: Progress) -> Executor:
        pending = (self._states.pending, self._states.pending_bins)
        parts = (self._decoder, self._cache, self._bank, *pending)
        if not isinstance(self._stream, CudaStream):
            return CpuExecutor(*parts, lambda: self.progress())
        capture = cuda_capture(self._stream) if self.config.cuda_graphs == "on" else eager

        def capture_one(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
            progress()
            return capture(work, kept=kept)

        with torch.inference_mode(), kernels_at_hand():
            return CudaExecutor(*parts, self.config, self._device, self._stream, capture_one)

    def _new_slot(self, slot_id: int) -> DecodeSlot[Staging]:
        """A slot. All kinds of steps share its staging, because a slot belongs to one step at a time."""
        n_outputs = self._n_rows * (1 + self.config.speculative_tokens)
        host = {
            "token_ids": self._device.host_buffer((n_outputs,), torch.int32),
            "accepted": self._device.host_buffer((self._n_rows,), torch.int32),
            "bins": self._device.host_buffer((n_outputs, self._n_bins), torch.int32),
        }
        return DecodeSlot(slot_id, self._stream, RenderBuffer(host, self._copy_stream), Staging())

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(
            model=self._info.name,
            fingerprint=self._info.fingerprint,
            vocab_size=self._model_config.vocab_size,
            max_model_len=self._max_model_len,
            n_pages=self._cache.n_pages,
            page_size=self._cache.page_size,
            max_batch_size=self._n_rows,
            eos_token_ids=self._info.eos_token_ids,
            values=self._decoder.value_tokens,
            images=self._decoder.images,
            processor=self._decoder.processor,
            adapters=self._info.architecture.adapters,
            device=self._device.kind,
            batching=self.config.batching,
        )

    # -- steps

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        staging = self._slots[slot_id].staging
        self._states.bind(batch.bindings)
        inputs = lay_out(batch, self._states.adapters(batch.rows))
        staging.plan = self._states.plan_outputs(batch, inputs)
        if batch.kind == "encode":
            staging.states = None
            self._enqueue(lambda: self._encode(slot_id, batch.images), batch.kind)
            return
        if self._decoder.images is not None and batch.kind == "decode":
            inputs = replace(inputs, rotary=inputs.positions + self._states.rotary_offsets(batch.rows))

        def forward() -> None:
            self._states.apply_bindings(batch.bindings)
            images = [(one.at, self._features.pop(one.key)) for one in batch.embeddings]
            staging.states = self._executor.forward(slot_id, inputs, images)
            if len(inputs.known_pending):
                rows = self._up(inputs.known_pending_rows)
                write_rows(self._states.pending, rows, self._up(inputs.known_pending))
                if inputs.pending_bins is not None:
                    write_rows(self._states.pending_bins, rows, self._up(inputs.pending_bins))

        self._enqueue(forward, batch.kind)

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        slot = self._slots[slot_id]
        staging, render = slot.staging, slot.render
        plan = staging.plan
        assert plan is not None, "launch_forward comes first"
        staging.sources = sources = {}
        lengths = {"token_ids": plan.n}
        known = {} if plan.drafts is not None else {"accepted": batch.outputs}
        if plan.drafts is not None:
            lengths["accepted"] = batch.size
        if self._n_bins:
            lengths["bins"] = plan.n
        if plan.top_logprobs is not None:
            render = render.extended(self._logprobs_on_host(plan.n, plan.top_logprobs))
            lengths |= dict.fromkeys(("logprobs", "top_ids", "top_logprobs"), plan.n)

        def sample() -> None:
            states = staging.states
            if plan.n:
                assert states is not None
                sources.update(self._sampler.sample(plan, batch, states, mask))

        self._enqueue(sample, "sample")
        ready = None if self._copy_stream is self._stream else self._stream.record()
        return render.start_transfer(ready, sources, lengths, known)

    def _encode(self, slot_id: int, images: Sequence[EncodeInput]) -> None:
        encoded = self._executor.encode(slot_id, [one.image for one in images])
        self._features |= zip((one.key for one in images), encoded, strict=True)

    def forget_images(self, keys: Sequence[int]) -> None:
        """Drop images that no step will use."""

        def forget() -> None:
            for key in keys:
                self._features.pop(key, None)

        self._enqueue(forget, "forget")

    def _enqueue(self, task: Callable[[], None], label: str) -> None:
        def run() -> None:
            with torch.inference_mode():
                task()

        self._stream.enqueue(run, label)

    @property
    def _n_bins(self) -> int:
        return 0 if self._decoder.value_tokens is None else N_BINS

    def _logprobs_on_host(self, n: int, k: int) -> dict[str, Tensor]:
        return {
            "logprobs": self._device.host_buffer((n,), torch.float32),
            "top_ids": self._device.host_buffer((n, k), torch.int32),
            "top_logprobs": self._device.host_buffer((n, k), torch.float32),
        }

    def _up(self, array: np.ndarray) -> Tensor:
        return upload(array, self._torch_device)

    # -- the rest of the protocol

    def adapter_key(self, adapter: str) -> str:
        """The adapter's content key. Also reads it into memory for `load_adapter`. Raises AdapterError."""
        return self._adapters.key(adapter)

    def adapter_at_hand(self, adapter: str) -> bool:
        """Whether `adapter_key` need not read or download it."""
        return self._adapters.at_hand(adapter)

    def load_adapter(self, adapter: str, slot: int) -> None:
        """Copy an adapter into a slot, in stream order between two steps. Raises AdapterError."""
        bank = self._bank
        if bank is None:
            raise AdapterError(f"adapter {adapter}: this engine has no adapter slots (lora_slots is 0)")
        if not 1 <= slot <= bank.n_slots:
            raise AdapterError(f"adapter slot must be 1 to {bank.n_slots}, got {slot}")
        weights = self._adapters.take(adapter)
        self._enqueue(lambda: bank.put(weights, slot), "adapter")

    def prepare_reload(self, model: str) -> Load:
        """See `Runtime.prepare_reload`. The weights are overwritten in place: memory never holds both."""
        info = self._reader.find(model)
        with torch.no_grad():
            self._reader.check(info, self._info)

        def load(progress: Progress = nothing, /) -> None:
            self._reload(info, progress)

        return load

    def _reload(self, info: ModelInfo, progress: Progress) -> None:
        self.synchronize()
        with torch.no_grad():
            self._executor = _NoWeights()
            for slot in self._slots:
                slot.staging.states = None  # refers to the old executor's tensors
            self._release_memory()
            self._decoder, self._info = self._reader.read(info, progress), info
            self._device.synchronize()
            self._executor = self._new_executor(progress)

    def _release_memory(self) -> None:
        """Return unused device memory to the driver."""
        if self._torch_device.type == "cuda":
            gc.collect()  # graphs and their callables form reference cycles
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._device.close()
