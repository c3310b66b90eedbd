"""Images on CUDA, with the small vision model: encoder graphs, regions as segments of their own, values in
captured steps.

Figures in bfloat16 are compared with those of the CPU in float32; a wrong mask is off by far more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver, Stream
from petiole.gpu_worker import Engine, Request, SamplingParams
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.request.prepared_images import IMAGE, ImageLayout, PreparedImage
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.runtime.interface import FEATURES, EncodeInput, KeptInput, StepBatch
from petiole.gpu_worker.scheduling.batching import encode_batch
from petiole.gpu_worker.text import load_tokenizer
from tests.gpu_worker.models.test_logits import relative_error
from tests.support.pictures import MODEL, file, picture

FOLDER = resolve_model(MODEL)
SIZES = [(130, 110), (200, 200), (70, 300), (240, 180)]
QUESTION = [1, 267, 2, 100, 101, 102, 103, 3]
VOCAB, CLOSE = 384, 0.1
ALL = SamplingParams(temperature=0.0, logprobs=VOCAB)
PAGES = [{"page_size": 1}, {"page_size": 16, "prefix_cache": "off"}]


class SeeingDriver(Driver):
    """Prefills whose prompts begin with an image."""

    key = 0
    keys: Sequence[int] = ()
    images: Sequence[PreparedImage] = ()
    bidirectional = True

    def encode(self, image: PreparedImage) -> int:
        self.key += 1
        batch = encode_batch([EncodeInput(self.key, image)])
        slot, self._slot = self._slot, 1 - self._slot
        self.runtime.launch_forward(slot, batch)
        self.runtime.launch_sampling(slot, batch, None).wait()
        return self.key

    def ask(self, images: Sequence[PreparedImage], *, bidirectional: bool = True) -> np.ndarray:
        """[images, positions, vocab]: log-probabilities behind the image and at each position of a question about
        it. All prefills are one step."""
        prompts = [[0, *[IMAGE] * image.n_positions, *QUESTION] for image in images]
        sequences = [self.sequence(prompt, ALL) for prompt in prompts]
        self.keys = [self.encode(image) for image in images]
        self.images, self.bidirectional = images, bidirectional
        outputs = [1 + len(QUESTION)] * len(images)
        output = self.finish_step(*self.launch("prefill", sequences, prompts, outputs))
        assert output.top_ids is not None
        assert output.top_logprobs is not None
        found = np.empty((len(output.top_ids), VOCAB))
        np.put_along_axis(found, output.top_ids.astype(np.int64), output.top_logprobs, axis=1)
        return found.reshape(len(images), 1 + len(QUESTION), VOCAB)

    def _batch(self, kind: Any, sequences: Sequence[Stream], *rest: Any) -> StepBatch:
        batch = super()._batch(kind, sequences, *rest)
        if IMAGE not in batch.token_ids:
            return batch
        first = np.cumsum(batch.lengths) - batch.lengths
        sizes = [image.n_positions for image in self.images]
        features = [KeptInput(key, int(at) + 1, n) for key, at, n in zip(self.keys, first, sizes, strict=True)]
        regions = np.array([(i, 0, 1 + n) for i, n in enumerate(sizes)], np.int32)
        return replace(batch, kept={FEATURES: features}, regions=regions if self.bidirectional else None)


def prepared(runtime: Any, k: int) -> PreparedImage:
    found: PreparedImage = runtime.limits.processor.prepared(picture(k, SIZES[k % 4]), k, ImageLayout(729))
    return found


def test_captured_encodes_equal_eager_ones(open_runtime: Any) -> None:
    """For each number of crops, in both slots, one behind the other while the device still sleeps."""
    runtime = open_runtime(FOLDER)
    images = [prepared(runtime, k) for k in range(6)]
    groups = [[0], [1], [0, 2], [3], [2, 4], [5]]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def encode(step: int) -> None:
        torch.cuda._sleep(4_000_000)
        features = runtime._executor.encode(step % 2, [images[k] for k in groups[step]])
        found.update({(step, k): one for k, one in zip(groups[step], features, strict=True)})

    for step in range(len(groups)):
        runtime._enqueue(lambda s=step: encode(s), "encode")
        if step % 2:
            runtime.synchronize()
    with torch.inference_mode():
        for (_, k), features in found.items():
            pixels = torch.from_numpy(images[k].pixels).to(features.device)
            (eager,) = runtime._decoder.encode([(pixels, images[k].tiling)])
            assert relative_error(features.float().cpu().numpy(), eager.float().cpu().numpy()) < CLOSE / 2


@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
def test_an_image_and_its_question_as_two_segments_equal_torch_attention(pages: Any, open_runtime: Any) -> None:
    on_cpu = SeeingDriver(open_runtime(FOLDER, device="cpu", dtype="float32"))
    images = [prepared(on_cpu.runtime, k) for k in (1, 0, 3)]
    expected = np.concatenate([on_cpu.ask([image]) for image in images])
    causal = np.concatenate([on_cpu.ask([image], bidirectional=False) for image in images])
    driver = SeeingDriver(open_runtime(FOLDER, max_num_seqs=3 * (1 + len(QUESTION)), **pages))
    got, got_causal = driver.ask(images), driver.ask(images, bidirectional=False)
    errors = relative_error(got, expected), relative_error(got_causal, causal)
    assert max(errors) < CLOSE
    assert 2 * max(errors) < relative_error(causal, expected), "another mask is another answer"


CALLS = {
    "query": SkillCall("query", {"question": "What color is the circle?"}),
    "caption": SkillCall("caption", {"length": "long"}),
    "point": SkillCall("point", {"object": "shape", "max_objects": 6}),
    "detect": SkillCall("detect", {"object": "shape", "max_objects": 6}),
}


def asked(name: str, k: int) -> Request:
    sampling = SamplingParams(max_tokens=19 if name in ("point", "detect") else 24, temperature=0.0)
    return Request(skill=CALLS[name], images=(file(k, size=SIZES[k % 4]),), sampling=sampling)


def answers(open_runtime: Any, mode: str, late: bool) -> tuple[list[Any], list[Any]]:
    """To each question alone, and to all of them at once."""
    runtime = open_runtime(FOLDER, pipeline=mode, prefix_cache="off", graph_batch_sizes=(8,))
    launch_forward = runtime.launch_forward

    def launch_late(slot_id: int, batch: StepBatch) -> None:
        with torch.cuda.stream(runtime._stream.raw):
            torch.cuda._sleep(4_000_000)
        launch_forward(slot_id, batch)

    if late:
        runtime.launch_forward = launch_late
    requests = [asked(name, k) for k in range(4) for name in CALLS]
    with Engine(runtime.config, runtime=runtime, tokenizer=load_tokenizer(FOLDER)) as engine:
        alone = [engine.submit(request).result(timeout=60).answer for request in requests]
        together = [result.answer for result in engine.generate(requests)]
    return alone, together


def test_skills_answer_pipelined_as_blocking(open_runtime: Any) -> None:
    """Exactly, with a host that is far ahead of the device, if nothing else is in the batch. Beside others sums
    run in another order, and a bin may be the one beside it."""
    (pipelined, together), (blocking, _) = (answers(open_runtime, *how) for how in (("on", True), ("off", False)))
    assert pipelined == blocking
    found = [value for answer in pipelined for value in answer.get("points", answer.get("objects", ()))]
    assert len(found) > 8
    equal = sum(a == b for a, b in zip(together, pipelined, strict=True))
    assert equal >= len(pipelined) // 2
    for a, b in zip(together, pipelined, strict=True):
        if a != b and "points" in a and len(a["points"]) == len(b["points"]):
            pairs = zip(a["points"], b["points"], strict=True)
            assert all(abs(p[axis] - q[axis]) < 0.05 for p, q in pairs for axis in ("x", "y"))
