"""Streams, events and transfers of the CPU device; and the trace that they leave."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.device.device import DeviceError, packed, unpacked
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.runtime.device.transfer import RenderBuffer
from tests.support.toy_engine import request, toy_engine


def test_a_stream_runs_in_order_on_a_thread_of_its_own() -> None:
    device, seen = CpuDevice(), []
    stream = device.new_stream("compute")
    for i in range(100):
        stream.enqueue(lambda i=i: seen.append((i, threading.current_thread().name)))  # type: ignore[misc]
    stream.synchronize()
    assert seen == [(i, "stream-compute") for i in range(100)]
    device.close()


def test_an_event_marks_what_lies_before_it_and_nothing_behind() -> None:
    device, gate, seen = CpuDevice(), threading.Event(), []
    stream = device.new_stream("compute")
    stream.enqueue(lambda: seen.append(1))
    before = stream.record()
    stream.enqueue(gate.wait)
    behind = stream.record()
    before.synchronize()
    assert (seen, before.query(), behind.query()) == ([1], True, False)
    gate.set()
    behind.synchronize()
    behind.synchronize()  # any number of waiters, any number of times
    device.close()


def test_a_stream_waits_for_another_streams_event_without_the_caller() -> None:
    device, gate, seen = CpuDevice(), threading.Event(), []
    compute, copy = device.new_stream("compute"), device.new_stream("copy")
    compute.enqueue(gate.wait)
    compute.enqueue(lambda: seen.append("computed"))
    copy.wait_event(compute.record())
    copy.enqueue(lambda: seen.append("copied"))
    done = copy.record()
    assert not done.query()
    gate.set()
    done.synchronize()
    assert seen == ["computed", "copied"]
    device.close()


def test_errors_are_sticky_and_reach_whoever_waits() -> None:
    device, ran = CpuDevice(), []
    stream = device.new_stream("compute")
    good = stream.record()

    def fail() -> None:
        raise ZeroDivisionError("a kernel")

    stream.enqueue(fail)
    stream.enqueue(lambda: ran.append(1))
    copy = device.new_stream("copy")
    copy.wait_event(stream.record())
    good.synchronize()
    for waiter in (stream, copy, device, stream.record()):
        with pytest.raises(DeviceError, match="a kernel"):
            waiter.synchronize()
    assert ran == []
    device.close()


def test_the_cpu_device_is_opened_by_name() -> None:
    device = open_device("cpu")
    assert device.kind == "cpu"
    device.close()


def test_a_transfer_copies_what_it_was_told_to_and_no_more() -> None:
    device = CpuDevice()
    compute, copy = device.new_stream("compute"), device.new_stream("copy")
    host = {name: np.zeros(4, np.int32) for name in ("token_ids", "accepted")}
    sources = {name: np.arange(1, 5, dtype=np.int32) for name in host}
    transfer = RenderBuffer(host, copy).start_transfer(compute.record(), sources, {"token_ids": 3, "accepted": 2})
    output = transfer.wait()
    assert (output.token_ids.tolist(), output.accepted.tolist(), output.logprobs) == ([1, 2, 3], [1, 2], None)
    assert host["token_ids"].tolist() == [1, 2, 3, 0]
    device.close()


def test_a_trace_names_every_stage_of_every_step_with_its_slot(tmp_path: Path) -> None:
    tracer = Tracer()
    engine = toy_engine(tracer=tracer)
    engine.runtime.device.on_span = tracer.record_device
    with engine:
        engine.generate([request(max_tokens=6, ignore_eos=True)])
    spans = tracer.spans()
    for step in range(6):
        mine = [span for span in spans if span["args"].get("step") == step]
        names = {span["name"] for span in mine if span["args"]["slot"] == step % 2}
        assert {"plan", "launch", "sample", "wait", "commit", "forward", "copy"} <= names
    tracer.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"engine", "compute", "copy"}
    assert NO_TRACE.spans() == []


def test_a_loaded_adapter_is_no_step_of_a_trace() -> None:
    tracer = Tracer()
    for label in ("prefill", "sample", "adapter", "decode", "sample"):
        tracer.record_device("compute", label, 0.0, 1.0)
    steps = [(span["name"], span["args"]["step"]) for span in tracer.spans()]
    assert steps == [("prefill", 0), ("sample", 0), ("adapter", None), ("decode", 1), ("sample", 1)]


class Card:
    """Stands in for torch's events: the device has passed those that were recorded before `passed`."""

    def __init__(self) -> None:
        self.recorded, self.passed = 0, 0

    def event(self, enable_timing: bool = False) -> Any:
        return CardEvent(self)

    def synchronize(self, device: object = None) -> None:
        self.passed = self.recorded


class CardEvent:
    def __init__(self, card: Card) -> None:
        self.card, self.at = card, 0

    def record(self, stream: object) -> None:
        self.card.recorded = self.at = self.card.recorded + 1

    def query(self) -> bool:
        return self.at <= self.card.passed

    def synchronize(self) -> None:
        self.card.synchronize()

    def elapsed_time(self, other: CardEvent) -> float:
        (milliseconds,) = struct.unpack("f", struct.pack("f", other.at - self.at))
        return float(milliseconds)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, fake in {
        "set_device": lambda device: None,
        "Stream": lambda device: None,
        "current_stream": lambda index: None,
        "set_stream": lambda raw: None,
        "is_current_stream_capturing": lambda: False,
        "synchronize": card.synchronize,
        "Event": card.event,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    return card


def test_spans_of_cuda_are_passed_on_as_the_device_ends_them(card: Card) -> None:
    seen = list[str]()
    device = CudaDevice()
    device.on_span = lambda stream, label, start, end: seen.append(label)
    stream = device.new_stream("compute")
    for label in ("a", "b"):
        stream.enqueue(lambda: None, label)
    assert seen == []
    card.passed += 2
    stream.enqueue(lambda: None, "c")
    assert seen == ["a"]
    device.synchronize()
    assert seen == ["a", "b", "c"]
    stream.enqueue(lambda: None, "d")
    device.close()
    assert seen == ["a", "b", "c", "d"]


def test_spans_of_cuda_are_as_long_on_a_worker_that_has_run_for_days(card: Card) -> None:
    lengths = list[float]()
    device = CudaDevice()
    device.on_span = lambda stream, label, start, end: lengths.append(end - start)
    for days in (0, 3):
        card.recorded = days * 86_400_000
        device.new_stream("compute").enqueue(lambda: None, "a step of a millisecond")
        device.synchronize()
    assert lengths == pytest.approx([1e-3, 1e-3])


def test_cuda_without_a_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for version, why in ((None, "was built without CUDA"), ("13.0", "sees no GPU")):
        monkeypatch.setattr("torch.version.cuda", version)
        with pytest.raises(ModelError, match=rf"cuda, but torch \S+ {why}"):
            open_device("cuda")
    assert open_device("auto").kind == "cpu"


def test_arrays_that_travel_together_arrive_as_they_were() -> None:
    fields = np.zeros(3, np.dtype([("a", np.float32), ("b", np.int64)], align=True))
    fields["a"], fields["b"] = [1.5, 2.5, 3.5], [4, 5, 6]
    arrays = [np.arange(5), fields["a"], np.array([[1, 2], [3, 4], [5, 6]], np.int32), np.zeros(0), fields["b"]]
    buffer = packed(arrays, pinned=False)
    arrived = unpacked(buffer, arrays)
    assert [found.numpy().dtype for found in arrived] == [array.dtype for array in arrays]
    for found, array in zip(arrived, arrays, strict=True):
        np.testing.assert_array_equal(found.numpy(), array)
        assert (found.data_ptr() - buffer.data_ptr()) % 16 == 0
