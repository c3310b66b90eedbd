"""Models whose texts are computed whole, as on CUDA: the vectors of transformers, whatever texts share a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.models.families.registry import find_model, model_of
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import Attention, Pooling
from petiole.gpu_worker.runtime.cpu.attention import TextAttention
from petiole.gpu_worker.runtime.cuda.executor import require_supported
from petiole.gpu_worker.runtime.cuda.whole_texts import TextsAttention, mask_bytes
from petiole.gpu_worker.runtime.interface import VECTORS
from tests.gpu_worker.models.test_encoders import tokens
from tests.support import fake_flashinfer
from tests.support.text_models import BERT, ENCODERS, MODERN, cosine, reference, write_encoder, write_m3

TOGETHER = ((1, 7, 40, 62, 2, 33), (20, 20, 20), (5,))
"""The lengths of the texts of a step."""


@pytest.mark.parametrize("name", ENCODERS)
def test_the_vectors_are_those_of_transformers(
    name: str, tmp_path: Path, open_runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    fake_flashinfer.install(monkeypatch)
    model = write_encoder(tmp_path, name)
    driver = Driver(fake_flashinfer.compute_as_on_cuda(open_runtime(tmp_path)))
    for lengths in TOGETHER:
        sequences = [driver.sequence(tokens(n)) for n in lengths]
        found = driver.prefill(sequences).side_outputs[VECTORS].copy()
        for n, vector in zip(lengths, found, strict=True):
            expected = reference(model, tokens(n), ENCODERS[name][2])
            assert cosine(vector, expected) > 0.9999999
            assert np.allclose(vector, expected, rtol=1e-4, atol=1e-4)
        for sequence in sequences:
            driver.finish(sequence)


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    write_m3(tmp_path)
    with pytest.raises(
        MachineError, match=r"nothing of single tokens \(sparse_linear and colbert_linear\); device="
    ):
        require_supported(find_model(tmp_path).plan)
    plan = model_of({"architectures": ["BertModel"], **BERT}).plan
    require_supported(plan)
    capped = [replace(layer, mixer=replace(layer.attention, softcap=30.0)) for layer in plan.layers]
    with pytest.raises(MachineError, match="BertModel, whose attention caps its scores"):
        require_supported(replace(plan, layers=tuple(capped)))
    reading = [
        replace(layer, mixer=replace(layer.attention, keys_of=i - 1 if i else None))
        for i, layer in enumerate(plan.layers)
    ]
    with pytest.raises(MachineError, match="BertModel, whose attention reads the keys of layer 0"):
        require_supported(replace(plan, layers=tuple(reading)))
    assert plan.pooling == Pooling(("mean",))


def test_padding_changes_nothing_that_is_read() -> None:
    """Texts of other lengths in the step, and of the same length: as one alone."""
    generator, lengths = torch.Generator().manual_seed(0), np.array([3, 9, 70, 1, 9, 40], np.int32)
    q, k, v = (torch.randn(int(lengths.sum()), n, 8, generator=generator) for n in (4, 2, 2))
    rotation = Rotation(None, 0.0, torch.arange(len(q)), None)
    for mask, window in (("bidirectional", 0), ("bidirectional", 3), ("causal", 0), ("causal", 4)):
        plan = [Attention(4, 2, 8, 8**-0.5, mask=mask, window=window)]  # type: ignore[arg-type]
        found = TextsAttention.of(plan, lengths, torch.device("cpu")).attend(0, q, k, v, rotation)
        at = 0
        for n in lengths.tolist():
            own = slice(at, at + n)
            alone = TextAttention(plan).attend(0, q[own], k[own], v[own], rotation)
            torch.testing.assert_close(found[own], alone)
            at += n


def test_a_long_text_beside_many_short_ones_takes_no_memory_for_each() -> None:
    lengths = np.array([2000, *[1] * 500, 33, 64, 2], np.int32)
    groups = TextsAttention.of([], lengths, torch.device("cpu")).groups
    assert [tuple(group.index.shape) for group in groups] == [(501, 2), (2, 64), (1, 2000)]


def test_numbers_that_are_not_finite_stay_in_their_text() -> None:
    lengths = np.array([2, 9], np.int32)
    q, k, v = (torch.ones(11, 4, 8) for _ in range(3))
    v[:2] = torch.nan
    attention = TextsAttention.of(
        [Attention(4, 4, 8, 8**-0.5, mask="bidirectional")], lengths, torch.device("cpu")
    )
    lengths[:] = 9, 2
    other = TextsAttention.of(attention.plan, lengths, torch.device("cpu"))
    rotation = Rotation(None, 0.0, torch.arange(11), None)
    assert attention.attend(0, q, k, v, rotation)[2:].isfinite().all()
    assert other.attend(0, q, k, v, rotation)[9:].isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_masks_take_no_more_memory_than_is_counted(seed: int) -> None:
    """With windows, of any texts that fit into a step."""
    plan = model_of({"architectures": ["ModernBertModel"], **MODERN}).plan
    draw, tokens, longest = np.random.default_rng(seed), 600, 200
    counted = mask_bytes(plan, tokens, longest, 4)
    for most in (1, 20, 200):
        drawn = draw.integers(1, most + 1, tokens).astype(np.int32)
        lengths = drawn[np.cumsum(drawn) <= tokens]
        q, k, v = (torch.zeros(int(lengths.sum()), n, 2) for n in (4, 4, 4))
        attentions = [replace(layer.attention, heads=4, kv_heads=4, head_dim=2) for layer in plan.layers]
        attention = TextsAttention.of(attentions, lengths, torch.device("cpu"))
        for i in range(len(attentions)):
            attention.attend(i, q, k, v, Rotation(None, 0.0, torch.arange(len(q)), None))
        made = {id(mask): mask for group in attention.groups for mask in group.masks.values() if mask is not None}
        windows = [mask for mask in made.values() if mask.shape[-2] > 1]
        assert sum(mask.numel() * (1 + 4) for mask in windows) <= counted
    assert mask_bytes(model_of({"architectures": ["BertModel"], **BERT}).plan, tokens, longest, 4) == 0
