"""A device that computes as late as it may, on a CPU: whoever fills a buffer again too early gets wrong tokens.

On CUDA a launch returns at once, and the kernel reads its inputs later: the copy from pinned memory, too. Here
every operation of torch is queued while a stream's task runs, in order, and nothing of the queue is done before
somebody waits for an event; then what lies before that event is done, and no more. So each step sees what the host
has written since, which is what a card that is slow enough would see, every time and without a thread.

    host     launch t, launch t+1, wait for t ──┐        fill the slot of t again, launch t+2, wait for t+1 ──┐
    queue    [ops of t][ops of t+1]             └ ops of t              [ops of t+1][ops of t+2]             └ ...

`_Late` is a `TorchDispatchMode`. It allocates the outputs of an operation, whose shapes a run on meta tensors
tells, and queues the operation and a copy of its results into them. Views and new tensors are made at once: they
read nothing. An operation whose shape depends on data waits for the queue, as CUDA does.

What looks at data behind torch's back (numpy's views, the stand-ins for kernels) is replaced in `install`.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from petiole.gpu_worker.runtime.cuda import executor as cuda
from petiole.gpu_worker.runtime.device import device as interface, transfer
from petiole.gpu_worker.runtime.device.device import DeviceError
from petiole.gpu_worker.runtime.memory import kv
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.step import pending
from petiole.gpu_worker.runtime.step.sampling import choose
from petiole.gpu_worker.runtime.step.verify import accept
from tests.support import fake_flashinfer

_current = threading.local()
_card = threading.RLock()
"""Whoever waits computes, one thread at a time."""


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self._stream, self.done = stream, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self._stream.run_to(self)


class LateStream:
    """A queue of operations and events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], object] | LateEvent] = deque()
        self.error: BaseException | None = None
        self.waits = 0
        """How often a task waited for data in the middle."""

    def enqueue(self, task: Callable[[], object], label: str | None = None) -> None:
        before, _current.stream = getattr(_current, "stream", None), self
        try:
            with _Late(self):
                task()
        finally:
            _current.stream = before

    def put(self, operation: Callable[[], object]) -> None:
        self.queue.append(operation)

    def record(self) -> LateEvent:
        event = LateEvent(self)
        self.queue.append(event)
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()

    def run_to(self, event: LateEvent) -> None:
        with _card, _disable_current_modes(), torch.inference_mode():
            while not event.done:
                self._run(self.queue.popleft())
        if self.error is not None:
            raise DeviceError(f"work on the late device failed: {self.error!r}") from self.error

    def _run(self, item: Callable[[], object] | LateEvent) -> None:
        if isinstance(item, LateEvent):
            item.done = True
        elif self.error is None:
            try:
                item()
            except BaseException as error:
                self.error = error


class LateDevice:
    """See `Device`."""

    kind: Literal["cpu", "cuda"] = "cpu"
    tasks_wait = False

    def __init__(self) -> None:
        self.on_span = None
        self.streams: list[LateStream] = []

    def new_stream(self, name: str) -> LateStream:
        self.streams.append(LateStream(name))
        return self.streams[-1]

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def close(self) -> None:
        self.streams.clear()


class _Late(TorchDispatchMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._can_decompose():
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        written, is_view = _effects(func)
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if is_view or not given:
            return func(*args, **kwargs)
        if written is not None:
            self._stream.put(lambda: func(*args, **kwargs))
            return args[written] if isinstance(written, int) else kwargs[written]
        try:
            shapes = _shapes(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            self._stream.waits += 1
            self._stream.synchronize()
            return func(*args, **kwargs)
        made = tree_map(_empty, shapes)
        self._stream.put(lambda: _fill(made, func(*args, **kwargs)))
        return made


def _effects(func: Any) -> tuple[int | str | None, bool]:
    """The argument that an operation writes and returns, if any, and whether it returns a view."""
    schema = func._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return (argument.name if argument.kwarg_only else position), False
    return None, any(result.alias_info is not None for result in schema.returns)


_known: dict[Any, Any] = {}
"""Shapes of results by operation and arguments: a run on meta tensors takes far longer than most operations."""


def _shapes(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, structure = torch.utils._pytree.tree_flatten((args, kwargs))
    key = (func, str(structure), *map(_described, leaves))
    if key not in _known:
        _known[key] = func(*tree_map_only(torch.Tensor, _on_meta, args), **_on_meta_device(kwargs))
    return _known[key]


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    return tuple(leaf.size()), tuple(leaf.stride()), leaf.dtype


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    moved = tree_map_only(torch.Tensor, _on_meta, kwargs)
    return {**moved, "device": "meta"} if moved.get("device") is not None else moved


def _empty(shape: Any) -> Any:
    if not isinstance(shape, torch.Tensor):
        return shape
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)


def _fill(made: Any, computed: Any) -> None:
    leaves = torch.utils._pytree.tree_leaves
    for target, source in zip(leaves(made), leaves(computed), strict=True):
        if isinstance(target, torch.Tensor):
            target.copy_(source)


def late_runtime(runtime: Any) -> Any:
    """`fake_flashinfer.compute_as_on_cuda` over a `LateDevice`, whose results are copied by a stream of their own.
    `install` comes first."""
    assert isinstance(runtime._device, LateDevice)
    copying = runtime._copy_stream = runtime._device.new_stream("copy")
    if runtime.kv_copies is not None:
        runtime.kv_copies._new_stream = lambda: runtime._device.new_stream("kv")
    for slot in runtime._slots:
        slot.render._copy_stream = copying
    runtime._sampler._choose, runtime._sampler._accept = _late_choose, _late_accept
    return fake_flashinfer.compute_as_on_cuda(runtime)


def _late_choose(logits: torch.Tensor, choice: Any) -> torch.Tensor:
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    _queue(lambda: token_ids.copy_(choose(logits.float(), choice)))
    return token_ids


def _late_accept(token_ids: torch.Tensor, values: Any, drafts: Any, n_rows: int, pending: Any) -> Any:
    found = torch.empty(len(token_ids), dtype=torch.int32), torch.empty(n_rows, dtype=torch.int32)
    _queue(lambda: _fill(found, accept(token_ids, values, drafts, n_rows, pending)))
    return found


def _queue(operation: Callable[[], object]) -> None:
    """On the stream whose task runs; at once if there is none."""
    stream = getattr(_current, "stream", None)
    if stream is None:
        operation()
    else:
        stream.put(operation)


def install(monkeypatch: Any) -> None:
    """Everything that would look at data at once, though a card would look later. `fake_flashinfer.install` comes
    first."""
    kernels = __import__("sys").modules
    layers = kernels["petiole.gpu_worker.runtime.cuda.fused.layers"]
    adapters = kernels["petiole.gpu_worker.runtime.cuda.fused.adapters"]
    for way in ("decode", "split_k"):
        products = kernels[f"petiole.gpu_worker.runtime.cuda.fused.linear.{way}"]
        monkeypatch.setattr(products, "fits", lambda decoder: False)
    for module, name in ((layers, "gather_pages"), (adapters, "add_terms")):
        monkeypatch.setattr(module, name, _later(getattr(module, name)))
    monkeypatch.setattr(kernels["petiole.gpu_worker.runtime.cuda.fused.choose"], "choose", _late_choose)
    monkeypatch.setattr(kernels["petiole.gpu_worker.runtime.cuda.fused.accept"], "accept", _late_accept)
    wrapper = fake_flashinfer._Wrapper
    monkeypatch.setattr(wrapper, "_attend", _attend_later(wrapper._attend))
    monkeypatch.setattr(wrapper, "_copy_later", lambda self, to, source: _queue(lambda: to.copy_(source)))
    for kind in (
        fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
    ):
        monkeypatch.setattr(kind, "plan", _on_the_host(kind.plan))
    for module in (interface, cuda):
        monkeypatch.setattr(module, "staged", lambda array, device: torch.from_numpy(array.copy()))
    monkeypatch.setattr(pending, "write_rows", _write_rows)
    monkeypatch.setattr("petiole.gpu_worker.runtime.building.upload_together", _upload_together)
    monkeypatch.setattr(KVCache, "update", _update)
    monkeypatch.setattr(transfer, "_copy", lambda target, source, n: target[:n].copy_(source, non_blocking=True))


def _later(kernel: Callable[..., None]) -> Callable[..., None]:
    return lambda *given: _queue(lambda: kernel(*given))


def _on_the_host(plan: Callable[..., None]) -> Callable[..., None]:
    """A plan reads pinned memory at once, and computes on the host; what it copies is queued."""

    def planned(self: Any, *given: Any, **settings: Any) -> None:
        with _disable_current_modes():
            plan(self, *given, **settings)

    return planned


def _attend_later(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attended(self: Any, q: Any, pages: Any, queries: Any, out: Any, return_lse: bool) -> Any:
        as_planned = copy.copy(self)
        if not return_lse:
            _queue(lambda: attend(as_planned, q, pages, queries, out, False))
            return out
        sums = torch.empty(q.shape[:2])
        _queue(lambda: sums.copy_(attend(as_planned, q, pages, queries, out, True)[1]))
        return out, sums

    return attended


def _write_rows(target: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    target[at] = values


def _upload_together(arrays: Any, device: torch.device) -> list[torch.Tensor]:
    return interface.unpacked(interface.packed(arrays, pinned=False), arrays)


def _update(self: KVCache, updates: Any) -> None:
    if len(updates.rows):
        at = [kv.upload(part, self.table.device).long() for part in (updates.rows, updates.columns)]
        pages = np.stack((updates.pages, *updates.windows))
        self.tables[:, at[0], at[1]] = kv.upload(pages, self.table.device)
