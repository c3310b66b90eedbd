"""The encoder of crops in compiled code: what torch computes, and the same bits for a crop behind any others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.moondream.config import VisionConfig
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.models.moondream.vision_encoder import Mlp, VisionEncoder
from petiole.gpu_worker.models.parts.attention import AttentionWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.encoder import NativeEncoder, native_encoder
from tests.support.dtypes import widened
from tests.support.trials import rest

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")


CONFIGS = st.builds(
    lambda heads, head_dim, ff, layers, grid: VisionConfig(
        heads * head_dim, heads, layers, ff, 8, CropGeometry(patch=2, grid=grid, margin=1, max_crops=4)
    ),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 16, 24, 64, 72, 88]),
    ff=st.sampled_from([18, 64, 130, 304]),
    layers=st.integers(1, 3),
    grid=st.sampled_from([3, 9, 14, 27]),
)
N_CROPS = st.integers(1, 4)


@dataclass
class OneByOne:
    """The product of patches, which torch computes before the layers: it has other bits for other numbers of
    crops."""

    linear: DenseLinear

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(crop[None]) for crop in x])


def random_encoder(config: VisionConfig, dtype: torch.dtype) -> VisionEncoder:
    generator, dim, grid = torch.Generator().manual_seed(0), config.dim, config.geometry.grid

    def weights(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def linear(outputs: int, inputs: int) -> DenseLinear:
        return DenseLinear(1.5 * weights(outputs, inputs), weights(outputs))

    def norm() -> NormWeights:
        return NormWeights(1 + weights(dim), weights(dim))

    def mlp(inner: int, outputs: int) -> Mlp:
        return Mlp(linear(inner, dim), linear(outputs, inner))

    layers = tuple(
        LayerWeights(
            mixer_norm=norm(),
            mixer=AttentionWeights(linear(3 * dim, dim), linear(dim, dim)),
            feed_forward_norm=norm(),
            feed_forward=FeedForwardWeights(linear(config.ff, dim), linear(dim, config.ff)),
        )
        for _ in range(config.layers)
    )
    patches = linear(dim, 3 * config.geometry.patch**2)
    return VisionEncoder(config, OneByOne(patches), weights(1, grid**2, dim), layers, norm(), mlp(8, 8))


def crops_of(config: VisionConfig, n: int, seed: int = 1) -> Tensor:
    size, draw = config.geometry.size, torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, size, size, 3), dtype=torch.uint8, generator=draw)


def opened(encoder: VisionEncoder) -> NativeEncoder:
    native = native_encoder(encoder)
    assert native is not None
    return native


@settings(max_examples=40)
@given(config=CONFIGS, n=N_CROPS)
def test_it_computes_what_torch_computes(config: VisionConfig, n: int) -> None:
    encoder, crops = random_encoder(config, torch.float32), crops_of(config, n)
    wanted = encoder.features(crops)
    torch.testing.assert_close(opened(encoder).features(crops), wanted, rtol=0, atol=1e-3)


@settings(max_examples=15)
@given(config=CONFIGS, n=N_CROPS)
def test_in_half_precision_it_is_as_near_to_the_exact_numbers_as_torch(config: VisionConfig, n: int) -> None:
    """Over several draws: nine patches alone have luck with their roundings."""
    encoder, drawn = random_encoder(config, torch.bfloat16), [crops_of(config, n, seed) for seed in range(6)]
    exact, torchs = (
        torch.cat([one.features(crops).float() for crops in drawn]) for one in (widened(encoder), encoder)
    )
    native = opened(encoder)
    found = torch.cat([native.features(crops).float() for crops in drawn])
    assert (found - exact).norm() < 1.2 * (torchs - exact).norm()


@pytest.mark.parametrize("dtype", rest([torch.bfloat16, torch.float32]), ids=str)
@settings(max_examples=20)
@given(config=CONFIGS, n=st.integers(2, 9))
def test_a_crop_gets_the_same_bits_alone_and_among_others(
    dtype: torch.dtype, config: VisionConfig, n: int
) -> None:
    native, crops = opened(random_encoder(config, dtype)), crops_of(config, n)
    together = native.features(crops)
    assert together.isfinite().all()
    assert torch.equal(torch.cat([native.features(one[None]) for one in crops]), together)
