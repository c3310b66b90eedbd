"""Products in Triton's interpreter whose sums have one order, as those of tensor cores have. The order of numpy's
depends on the number of rows."""

from __future__ import annotations

import pytest
import triton.runtime.interpreter as interpreter


def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input is added to the sums after the inputs before it."""

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        total, left, right = d.data.copy(), a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
        for i in range(left.shape[-1]):
            total += left[..., :, i, None] * right[..., None, i, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
