"""ModelRuntime: computes steps of a model behind the `Runtime` protocol. `building` has made all that it uses.

A launch prepares the step's arrays on the engine thread and enqueues its computation on the one compute stream.
The enqueued work reads of the host what its launch has written, and nothing else. That of an open batch settles
the batch first: sizes that a sampling takes from the plan are the same before and after. Prefill, decode and
verify steps differ only in their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import AdapterError, ModelError
from petiole.gpu_worker.models.weights.copying import TensorSource
from petiole.gpu_worker.models.weights.description import formats_of
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.runtime.building import build, limits_of, side_inputs
from petiole.gpu_worker.runtime.device.device import Device, upload
from petiole.gpu_worker.runtime.interface import (
    Computing,
    EncodeInput,
    KVCopies,
    LoadWeights,
    ModelLimits,
    Progress,
    StepBatch,
    TokenMask,
    Transfer,
    nothing,
)
from petiole.gpu_worker.runtime.memory.copies import PoolCopies
from petiole.gpu_worker.runtime.memory.features import KeptFeatures
from petiole.gpu_worker.runtime.model_files import ModelInfo
from petiole.gpu_worker.runtime.platforms import Executor
from petiole.gpu_worker.runtime.step.in_doubt import is_open
from petiole.gpu_worker.runtime.step.inputs import Parts, StepInputs, StepStates, lay_out


class _NoWeights:
    """The executor while weights are being replaced. If that fails, it stays, and every step raises ModelError."""

    kernels = instructions = ""

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        raise self._lost

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        raise self._lost

    def catch_up(self) -> None:
        """Nothing is owed."""

    @property
    def _lost(self) -> ModelError:
        return ModelError("the weights were lost because a reload failed; start a new engine")


class ModelRuntime:
    """The `Runtime` that computes a real model (see `gpu_worker.runtime.interface`)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        device: Device | None = None,
        source: TensorSource | None = None,
        loading: Progress = nothing,
    ) -> None:
        """`source`: see `ModelReader`. loading: the `progress` of `build`."""
        self.progress: Progress = nothing
        built = build(config, device, source, loading)
        self.config, self._platform, self._device = built.config, built.platform, built.platform.device
        self._reader, self._info, self._decoder = built.reader, built.info, built.decoder
        self._stream, self._copy_stream, self._slots = built.stream, built.copy_stream, built.slots
        self._memory, self._adapters, self._sampler = built.memory, built.adapters, built.sampler
        self._states, self._sides, self._takes = built.memory.states, built.sides, side_inputs(built.decoder)
        self._in_doubt = built.in_doubt
        self.kv_copies: KVCopies | None = None
        kept = built.decoder.plan.with_drafting
        if not (built.info.plan.whole_texts or built.memory.cache.windows or built.memory.recurrent):
            of_its_own = partial(self._platform.copy_stream, self._stream, "kv")
            self.kv_copies = PoolCopies(
                built.memory.cache, kept, self._stream, of_its_own, before=lambda: self._executor.catch_up()
            )
        self._features: dict[int, Tensor] = {}  # of encoded images, by key; used in stream order
        self._kept_features = KeptFeatures(self.config.image_cache_bytes)
        with torch.no_grad():
            self._executor: Executor = self._new_executor(loading)
        self.limits: ModelLimits = self._new_limits()

    def _new_executor(self, progress: Progress) -> Executor:
        return self._platform.new_executor(
            self._decoder,
            self._memory,
            self._stream,
            self.config,
            stepping=lambda: self.progress(),
            building=progress,
        )

    def _new_limits(self) -> ModelLimits:
        computing = Computing(
            weight_format=formats_of(self._decoder),
            weight_bytes=self._reader.weight_bytes,
            kernels=self._executor.kernels,
            instructions=self._executor.instructions,
            threads=torch.get_num_threads() if self._device.kind == "cpu" else 0,
        )
        return limits_of(
            self._info,
            self._decoder,
            self._memory,
            self.config,
            self._device,
            computing,
            goes_ahead=self._in_doubt is not None,
        )

    # -- steps

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        staging = self._slots[slot_id].staging
        assert self._takes.issuperset((*batch.side_inputs, *batch.kept)), "side inputs are declared"
        self._states.bind(batch.bindings)
        bound = self._states.bound(batch.rows)
        inputs = lay_out(batch, bound.adapters)
        staging.batch, staging.plan = batch, self._states.plan_outputs(batch, inputs, bound)
        if batch.kind == "encode":
            staging.states = None
            self._enqueue(lambda: self._encode(slot_id, batch.images), batch.kind)
            return

        def forward() -> None:
            self._states.apply_bindings(batch.bindings)
            settled, step = batch, inputs
            if is_open(batch):
                assert self._in_doubt is not None, "only a runtime that goes ahead takes open batches"
                settled = self._in_doubt.settled(batch, self._states.pending.token_ids.numpy())
                step = lay_out(settled, bound.adapters)
                staging.batch, staging.plan = settled, self._states.plan_outputs(settled, step, bound)
            if self._decoder.images is not None and batch.kind == "decode":
                step = replace(step, rotary=step.positions + bound.rotary_offsets.repeat(settled.lengths))
            if batch.kept:
                step = replace(step, kept=self._kept(settled))
            staging.states = self._executor.forward(slot_id, step)
            if len(inputs.known_pending):
                known = None if inputs.known_values is None else self._up(inputs.known_values)
                rows = self._up(inputs.known_pending_rows)
                self._states.pending.write(rows, self._up(inputs.known_pending), known)

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
        if batch.ahead is not None and (batch.ahead * batch.outputs).any():
            lengths["drafts"] = batch.size
        lengths |= dict.fromkeys(self._sides, plan.n)
        if plan.top_logprobs is not None:
            names = ("logprobs", "top_ids", "top_logprobs")
            render = render.extended(self._logprobs_on_host(plan.n, plan.top_logprobs, names))
            lengths |= dict.fromkeys(names, plan.n)
        if plan.scores is not None:
            names = ("scored_logprobs", "scored_ids", "scored_top")
            render = render.extended(self._logprobs_on_host(plan.scores.n, plan.scores.top, names))
            lengths |= dict.fromkeys(names, plan.scores.n)

        def sample() -> None:
            states, settled, outputs = staging.states, staging.batch, staging.plan
            if plan.n or plan.scores is not None or plan.following is not None:
                assert states is not None
                assert settled is not None
                assert outputs is not None
                sources.update(self._sampler.sample(outputs, settled, states, mask))

        self._enqueue(sample, "sample")
        ready = None if self._copy_stream is self._stream else self._stream.record()
        return render.start_transfer(ready, sources, lengths, known)

    def _kept(self, batch: StepBatch) -> dict[str, Parts]:
        """The side inputs that an encode has made. The last step that uses one drops it."""
        found: dict[str, Parts] = {}
        for name, parts in batch.kept.items():
            features = [self._features.pop(one.key) if one.last else self._features[one.key] for one in parts]
            found[name] = [
                (one.at, whole[:, one.skipped : one.skipped + one.n_positions])
                for one, whole in zip(parts, features, strict=True)
            ]
        return found

    def _encode(self, slot_id: int, images: Sequence[EncodeInput]) -> None:
        new = list[EncodeInput]()
        for one in images:
            if (kept := self._kept_features.get((one.salt, one.image.content_hash))) is not None:
                self._features[one.key] = kept
            else:
                new.append(one)
        encoded = self._executor.encode(slot_id, [one.image for one in new]) if new else ()
        for one, features in zip(new, encoded, strict=True):
            self._features[one.key] = features
            if one.salt is not None:
                self._kept_features.put((one.salt, one.image.content_hash), features)

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

    def _logprobs_on_host(self, n: int, k: int, names: tuple[str, str, str]) -> dict[str, Tensor]:
        forms = ((n,), torch.float32), ((n, k), torch.int32), ((n, k), torch.float32)
        return {name: self._device.host_buffer(*form) for name, form in zip(names, forms, strict=True)}

    def _up(self, array: np.ndarray) -> Tensor:
        return upload(array, self._platform.place)

    # -- the rest of the protocol

    def encoded_images(self) -> int:
        return self._kept_features.made

    def feature_hits(self) -> int:
        return self._kept_features.hits

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        found = []
        for n, layer in enumerate(self._decoder.plan.layers):
            if layer.experts is not None:
                experts = self._decoder.layers[n].experts
                assert experts is not None
                found.append(experts.taken.tolist())
        return found

    def adapter_key(self, adapter: str) -> str:
        """The adapter's content key. Also reads it into memory for `load_adapter`. Raises AdapterError."""
        return self._adapters.key(adapter)

    def adapter_at_hand(self, adapter: str) -> bool:
        """Whether `adapter_key` need not read or download it."""
        return self._adapters.at_hand(adapter)

    def load_adapter(self, adapter: str, slot: int) -> None:
        """Copy an adapter into a slot, in stream order between two steps. Raises AdapterError."""
        bank = self._memory.bank
        if bank is None:
            raise AdapterError(f"adapter {adapter}: this engine has no adapter slots (lora_slots is 0)")
        if not 1 <= slot <= bank.n_slots:
            raise AdapterError(f"adapter slot must be 1 to {bank.n_slots}, got {slot}")
        weights = self._adapters.take(adapter)
        self._enqueue(lambda: bank.put(weights, slot), "adapter")

    def prepare_reload(self, model: str) -> LoadWeights:
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
            self._kept_features.clear()
            for slot in self._slots:
                slot.staging.states = None  # refers to the old executor's tensors
            self._platform.release_memory()
            self._decoder, self._info = self._reader.read(info, progress), info
            self._device.synchronize()
            self._executor = self._new_executor(progress)
        self.limits = self._new_limits()

    def synchronize(self) -> None:
        self._device.synchronize()

    def close(self) -> None:
        self._device.close()
