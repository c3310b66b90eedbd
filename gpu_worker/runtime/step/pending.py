"""The pending inputs: what a row's next step reads and only the device knows, a token and the numbers beside
it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PendingInputs:
    """The rows' next inputs. token_ids: int64 [rows]. values: int32 [rows, width], the lines beside them; a width
    of 0 for a model without values. Accessed in stream order."""

    token_ids: Tensor
    values: Tensor

    def write(self, rows: Tensor, token_ids: Tensor, values: Tensor | None) -> None:
        """values: None if the tokens carry none."""
        write_rows(self.token_ids, rows, token_ids)
        if values is not None:
            write_rows(self.values, rows, values)


def write_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows] = values. On a CPU, numpy is about ten times as fast as torch for the few rows of a step."""
    if target.device.type == "cpu":
        target.numpy()[rows.numpy()] = values.numpy()
    else:
        target[rows] = values
