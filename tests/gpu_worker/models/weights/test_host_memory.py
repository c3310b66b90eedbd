"""Large tensors on the host: like torch's own, in larger pages."""

from __future__ import annotations

import pytest
import torch

from petiole.gpu_worker.models.weights.host_memory import Room, new_tensor, new_zeros

CPU = torch.device("cpu")
SHAPES = [(0, 3), (5, 3), (1024, 1024), (1025, 1031)]
"""On either side of the size from which pages are large; the last fills no whole number of them."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_zeros_are_zeros_and_keep_what_is_written(shape, dtype):
    tensor = new_zeros(shape, dtype, CPU)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor += 1
    assert bool((tensor == 1).all())


def test_a_tensor_on_no_device_takes_no_memory():
    assert new_tensor((2**40,), torch.float32, torch.device("meta")).is_meta


def test_small_tensors_lie_one_after_the_other_and_large_ones_alone():
    room = Room(2**24)
    shapes = [*[(k, 33) for k in range(200)], (3000, 1000)]
    tensors = [room.tensor(shape, torch.float16).fill_(i) for i, shape in enumerate(shapes)]
    for i, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True)):
        assert tensor.shape == shape
        assert bool((tensor == i).all())
    begins = [tensor.data_ptr() for tensor in tensors[1:-1]]
    assert all(begin % 64 == 0 for begin in begins)
    assert begins == sorted(begins)
    assert begins[-1] - begins[0] < 2**22
    assert tensors[-1].untyped_storage().data_ptr() == tensors[-1].data_ptr()
