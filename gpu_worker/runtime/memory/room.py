"""Checks that the configured rows and adapters fit into memory, before allocating any of them."""

from __future__ import annotations

from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.errors import InvalidRequest
from petiole.gpu_worker.models.adapters.lora import AdaptedModel
from petiole.gpu_worker.models.plan import ModelPlan


def require_rows_and_adapters(
    engine: EngineConfig, model: ModelPlan, *, max_model_len: int, bytes_per_element: int, room: int
) -> None:
    """Raises InvalidRequest if the rows, adapter slots or ranks do not fit into `room` bytes."""
    require_room("max_num_seqs", engine.max_num_seqs, row_bytes(engine, model, max_model_len), room)
    if engine.lora_slots:
        each = AdaptedModel(model).rank_bytes(bytes_per_element)
        require_room("lora_max_rank", engine.lora_max_rank, 2 * each, room)
        require_room("lora_slots", engine.lora_slots, engine.lora_max_rank * each, room)


def require_room(field: str, value: int, each_bytes: int, free_bytes: int) -> None:
    """Raises InvalidRequest if `value` items of `each_bytes` do not fit. One item is always allowed."""
    most = max(1, free_bytes // each_bytes)
    if value > most:
        raise InvalidRequest(field, f"must be at most {most} in {free_bytes} bytes ({each_bytes} each)", value)


def row_bytes(engine: EngineConfig, model: ModelPlan, max_model_len: int) -> int:
    """Maximum bytes of a row: its entries in both page tables, the logits of its outputs, and its
    sampling state."""
    columns = -(-max_model_len // engine.page_size)
    return 2 * 4 * columns + model.vocab_size * 4 * (1 + engine.speculative_tokens) + state_bytes(model)


def state_bytes(model: ModelPlan) -> int:
    """Bytes of a row's penalty counts, seen mask and bias, which the first request that needs them allocates for
    all rows."""
    return model.vocab_size * (4 + 1 + 4)
