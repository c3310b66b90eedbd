"""Checks that the configured rows and adapters fit into memory, before allocating any of them."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial

from petiole.cache import WindowPages, most_pages
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import InvalidRequest, MachineError
from petiole.gpu_worker.models.adapters.lora import AdaptedModel
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.memory.states import state_bytes


def require_rows_and_adapters(
    engine: EngineConfig, model: ModelPlan, *, max_model_len: int, bytes_per_element: int, room: int
) -> None:
    """Raises InvalidRequest if the rows, adapter slots or ranks do not fit into `room` bytes."""
    each = row_bytes(engine, model, max_model_len)
    each += state_bytes(model, bytes_per_element) * states_of_row(engine)
    require_room("max_num_seqs", engine.max_num_seqs, each, room)
    if engine.lora_slots:
        each = AdaptedModel(model).rank_bytes(bytes_per_element)
        require_room("lora_max_rank", engine.lora_max_rank, 2 * each, room)
        require_room("lora_slots", engine.lora_slots, engine.lora_max_rank * each, room)


def require_room(field: str, value: int, each_bytes: int, free_bytes: int) -> None:
    """Raises InvalidRequest if `value` items of `each_bytes` do not fit. One item is always allowed."""
    most = max(1, free_bytes // each_bytes)
    if value > most:
        raise InvalidRequest(field, f"must be at most {most} in {free_bytes} bytes ({each_bytes} each)", value)


WINDOW_PART = 4
"""A group of layers with a window has a page for this many pages of the others: then sequences of 8 windows, with
two windows of cached pages each, need all pools alike."""


def page_bytes(engine: EngineConfig, model: ModelPlan, bytes_per_element: int) -> int:
    """Bytes of a page of the KV pool, in the layers of all groups."""
    return model.kv_elements_per_token * engine.page_size * bytes_per_element


def window_pools(engine: EngineConfig, model: ModelPlan, n_pages: int) -> tuple[WindowPages, ...]:
    """The pools of the groups of layers with a window, beside `n_pages` pages of the others. Each is large enough
    for a sequence of any length. With a KV tier, which keeps pages of all layers alike, there are none: these
    layers keep every position. engine: decided."""
    if engine.kv_tier and engine.prefix_cache != "off" and not model.keeps_states:
        return ()
    windows = sorted({window for window in model.kept_windows if 0 < window < engine.max_model_len})
    least = [1 + most_pages(window, engine.page_size, engine.longest_step) for window in windows]
    return tuple(
        WindowPages(window, min(n_pages, max(pages, -(-n_pages // WINDOW_PART))))
        for window, pages in zip(windows, least, strict=True)
    )


LEAST_SNAPSHOTS = 8


def snapshot_bytes(engine: EngineConfig, model: ModelPlan, bytes_per_element: int) -> int:
    return state_bytes(model, bytes_per_element, rounded=engine.snapshot_quantization == "int8")


def snapshots_of(
    engine: EngineConfig, model: ModelPlan, bytes_per_element: int, n_pages: int, *, of_states: int | None = None
) -> int:
    """The number of snapshots of layers that keep a state, with the reserved one, beside `n_pages` pages: so
    many that they take as much memory as the KV does, but at least some; without a prefix cache, one that is never
    used. 0: no layer keeps a state. of_states: bytes of an element of states, if it is not that of the KV."""
    each = snapshot_bytes(engine, model, of_states or bytes_per_element)
    if each and engine.prefix_cache == "off":
        return 2
    kv = n_pages * page_bytes(engine, model, bytes_per_element)
    return 1 + max(min(kv // each, n_pages), LEAST_SNAPSHOTS) if each else 0


def pool_bytes(
    engine: EngineConfig,
    model: ModelPlan,
    bytes_per_element: int,
    n_pages: int,
    *,
    of_states: int | None = None,
) -> int:
    """Bytes of the pools of all groups, with `n_pages` pages of the layers that keep everything. of_states: see
    `snapshots_of`."""
    pages = dict(window_pools(engine, model, n_pages))
    kept, homes = model.kept_windows, set(model.kv_homes.values())
    elements = sum(mixer.kept_size * pages.get(kept[i], n_pages) for i, mixer in model.caches if i in homes)
    snapshots = snapshots_of(engine, model, bytes_per_element, n_pages, of_states=of_states)
    states = snapshots * snapshot_bytes(engine, model, of_states or bytes_per_element)
    return elements * engine.page_size * bytes_per_element + states


def pages_in(
    engine: EngineConfig,
    model: ModelPlan,
    bytes_per_element: int,
    room: int,
    *,
    of_states: int | None = None,
) -> int:
    """The most pages of the layers that keep everything, for which `pool_bytes` is at most `room`."""
    most = (WINDOW_PART + 1) * (max(room, 0) // page_bytes(engine, model, bytes_per_element) + 1)
    taken = partial(pool_bytes, engine, model, bytes_per_element, of_states=of_states)
    return bisect_right(range(most), room, key=taken) - 1


def require_pages(
    engine: EngineConfig, n_pages: int, each_bytes: int, free_bytes: int, features_bytes: int = 0
) -> int:
    """The number of pages, if a sequence can run with them. Page 0 is reserved. features_bytes: what kept features
    of images may take, which are no part of free_bytes. Raises MachineError."""
    if n_pages < 2:
        features = f", image_cache_bytes {features_bytes}" if features_bytes else ""
        raise MachineError(
            f"no memory for the KV cache: a page takes {each_bytes} bytes, and {max(free_bytes, 0)} are left "
            f"beside the weights, max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens "
            f"{engine.max_num_batched_tokens}{features} and lora_slots {engine.lora_slots}: lower these, or raise "
            f"gpu_memory_utilization ({engine.gpu_memory_utilization:g})"
        )
    return n_pages


def row_bytes(engine: EngineConfig, model: ModelPlan, max_model_len: int) -> int:
    """Maximum bytes of a row: its entries in both page tables, the logits of its outputs, and its
    sampling state."""
    columns = -(-max_model_len // engine.page_size)
    return 2 * 4 * columns + model.vocab_size * 4 * (1 + engine.speculative_tokens) + sampling_bytes(model)


def states_of_row(engine: EngineConfig) -> int:
    """The states of a row: its own, and with drafts the one before them."""
    return 2 if engine.speculative_tokens else 1


def sampling_bytes(model: ModelPlan) -> int:
    """Bytes of a row's penalty counts, seen mask and bias, which the first request that needs them allocates for
    all rows."""
    return model.vocab_size * (4 + 1 + 4)
