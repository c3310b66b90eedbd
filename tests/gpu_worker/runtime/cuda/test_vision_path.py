"""Images and values on the CUDA path (staging, graphs by crops, segments, bins) give the CPU's answers.

The small vision model serves, in float32; FlashInfer is replaced by its interface in torch (see `support`), on a
device that computes as late as it may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from petiole.contract.settings.engine import BATCHING
from petiole.gpu_worker import Engine, EngineConfig, Request, Result, SamplingParams
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.moondream.config import text_plan
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.runtime.cuda import encoder
from petiole.gpu_worker.runtime.cuda.encoder import crop_ladder
from petiole.gpu_worker.runtime.cuda.executor import CudaExecutor, batching_that_fits
from petiole.gpu_worker.runtime.cuda.graphs import Graphs
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.runtime.step.inputs import StepInputs
from petiole.gpu_worker.text import load_tokenizer
from tests.support import fake_flashinfer, late_device
from tests.support.late_device import LateDevice
from tests.support.pictures import MODEL, file, picture

OpenEngine = Callable[..., Engine]

CALLS = (
    SkillCall("query", {"question": "What color is the circle?"}),
    SkillCall("point", {"object": "shape", "max_objects": 4}),
    SkillCall("detect", {"object": "circle", "max_objects": 3}),
    SkillCall("caption", {"length": "long"}),
    SkillCall("query", {"question": "How many shapes?", "reasoning": True}),
)
SIZES = [(130, 110), (60, 60), (300, 90), (200, 200)]


def settings(**more: Any) -> dict[str, Any]:
    small = {"num_pages": 1500, "max_num_seqs": 4, "num_threads": 1, "graph_batch_sizes": (4,), "debug": True}
    return {"model": MODEL, "device": "cpu", "dtype": "float32", **small, **more}


@pytest.fixture
def open_late(monkeypatch: pytest.MonkeyPatch) -> OpenEngine:
    """An engine on the late device, with the executor of CUDA."""
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    fake_flashinfer.install(monkeypatch)
    late_device.install(monkeypatch)

    def get(**more: Any) -> Engine:
        config = EngineConfig(**settings(**more))
        runtime = ModelRuntime(config, device=LateDevice())  # type: ignore[arg-type]
        tokenizer = load_tokenizer(resolve_model(MODEL))
        return Engine(config, runtime=late_device.late_runtime(runtime), tokenizer=tokenizer)

    return get


@pytest.fixture(scope="module")
def expected() -> Iterator[list[Result]]:
    """On the CPU, one at a time."""
    with Engine(EngineConfig(**settings(pipeline="off", prefix_cache="off"))) as engine:
        yield [engine.submit(request).result(timeout=60) for request in requests()]


def requests() -> list[Request]:
    """All skills about pictures of several sizes, some of them twice; and text."""
    found = []
    for k in range(15):
        most = 13 if CALLS[k % 5].name in ("point", "detect") else 16
        sampling = SamplingParams(max_tokens=most, temperature=0.0)
        picture = file(k % 4, size=SIZES[k % 4])
        found.append(Request(skill=CALLS[k % 5], images=(picture,), sampling=sampling))
    found.append(replace(found[0], images=()))
    found.append(Request(prompt="A picture of", sampling=SamplingParams(max_tokens=12, temperature=0.0)))
    return found


@pytest.mark.parametrize(
    ("page_size", "cache", "policy"),
    [(1, "radix", "pipelined"), (16, "block", "pipelined"), (16, "off", "mixed"), (1, "radix", "drain")],
)
def test_answers_are_those_of_the_cpu(
    page_size: int, cache: str, policy: str, open_late: OpenEngine, expected: list[Result]
) -> None:
    machine = {"page_size": page_size, "prefix_cache": cache, "prefill_policy": policy}
    with open_late(**machine) as engine:
        results = engine.generate(requests())
        runtime: Any = engine.runtime
        assert runtime._stream.waits == 0, "the host waits for data at a commit alone"
        assert not runtime._features
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.answer for r in results] == [r.answer for r in expected], "bin for bin"
    found = [len(r.answer.get("points", r.answer.get("objects", ()))) for r in results if r.answer]
    assert sum(found) > 3, "there were values to decode"


def test_only_prefills_of_images_are_not_captured(open_late: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured are decodes of every skill, in which what was decoded is embedded, and questions about an image
    whose KV is cached."""
    replayed, eager = list[tuple[str, bool]](), list[tuple[str, bool]]()
    run, append = Graphs.run, CudaExecutor._append

    def listen(to: list[tuple[str, bool]], inputs: StepInputs) -> None:
        to.append((inputs.kind, inputs.limits is not None))

    monkeypatch.setattr(
        Graphs, "run", lambda self, shape, i, *more: listen(replayed, i) or run(self, shape, i, *more)
    )
    monkeypatch.setattr(
        CudaExecutor, "_append", lambda self, *step: listen(eager, step[1].inputs) or append(self, *step)
    )
    with open_late() as engine:
        eager.clear()
        engine.generate(requests())
    assert set(eager) == {("prefill", True)}
    assert set(replayed) == {("decode", False), ("prefill", False)}


def test_a_resumed_answer_is_read_again_with_its_bins(open_late: OpenEngine, expected: list[Result]) -> None:
    """A recompute: known bins among the inputs of a prefill, and as the next input of a decode."""
    requested = requests()[1]
    bins: list[Any] = []
    with open_late() as engine:
        engine.submit(requested, on_delta=lambda _, d: bins.extend(d.bins or ())).result(timeout=60)
        for n in range(1, len(expected[1].token_ids)):
            again = replace(requested, resume_token_ids=expected[1].token_ids[:n], resume_bins=bins[:n])
            assert engine.submit(again).result(timeout=60).answer == expected[1].answer


# ------------------------------------------------------------ encode


def prepared(limits: ModelLimits, k: int) -> PreparedImage:
    assert limits.processor is not None
    return limits.processor.prepared(picture(k, SIZES[k % 4]), k, ImageLayout(729))


@pytest.mark.parametrize("shared", [False, True])
def test_captured_encodes_of_any_number_of_crops_equal_eager_ones(
    shared: bool, open_late: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together and alone, two of them in flight; what an earlier step has left in the padding makes no difference.
    But where both slots have one pinned buffer, the second overwrites crops that the first has not copied yet."""
    monkeypatch.setattr(encoder, "crop_ladder", lambda most: [3, most])
    runtime: Any = open_late().runtime
    images = [prepared(runtime.limits, k) for k in range(8)]
    encoders = runtime._executor._encoder
    if shared:
        encoders._pinned[1] = encoders._pinned[0]
    found: dict[int, torch.Tensor] = {}
    crops = list[int]()
    for step, group in enumerate(([3], [0], [1, 2], [7], [4, 5], [6])):
        crops.append(sum(len(images[k].pixels) for k in group))
        encode = partial(encoders.encode, step % 2, [images[k] for k in group])
        runtime._enqueue(lambda e=encode, g=group: found.update(zip(g, e(), strict=True)), "encode")
        if step % 2:
            runtime.synchronize()
    assert crops == [5, 2, 4, 5, 4, 2]
    eager = [runtime._decoder.encode([(torch.from_numpy(i.pixels), i.tiling)])[0] for i in images]
    right = [torch.allclose(found[k], eager[k], atol=1e-5) for k in range(8)]
    assert all(right) != shared
    runtime.close()


def test_the_ladder_of_crops_ends_at_the_most_that_a_step_has() -> None:
    assert crop_ladder(1) == [1]
    assert crop_ladder(5) == [2, 3, 4, 5]
    assert crop_ladder(13) == [*range(2, 14)]
    assert crop_ladder(16) == [*range(2, 17)]
    assert crop_ladder(30) == [*range(2, 16), 16, 20, 24, 28, 30]


def test_a_chunk_holds_an_image_by_default_on_a_small_card() -> None:
    model = text_plan({"config": {}})
    for policy in ("pipelined", "mixed"):
        config = EngineConfig(prefill_policy=policy)  # type: ignore[arg-type]
        decided = batching_that_fits(config, BATCHING["cuda"], model, 2, 2**31, 500 * 2**20, 730)
        assert decided.chunk_size >= 730
