"""Workers' reports, as `petiole status` shows them.

Every `REPORT_INTERVAL_S` each worker writes its field of the hash `WORKERS_KEY`: the time of the report by
Redis's clock, a space, and the report as JSON. So the ages of all reports are comparable even if the hosts' clocks
differ. A worker that shuts down removes its field; one that dies is shown as lost, and removed after an hour.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version as installed
from typing import Annotated, Literal, NamedTuple

import redis
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import WORKERS_KEY

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 2.0
LOST_AFTER_S = 3 * REPORT_INTERVAL_S
FORGOTTEN_AFTER_S = 3600
FORGET_INTERVAL_S = 300.0
GENERATIONS_SHOWN = 64

# KEYS[1] the hash; ARGV: seconds after which an entry is removed that begins with its time. Others are left.
FORGET = """
local now = redis.call('TIME')
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  local at = string.match(redis.call('HGET', KEYS[1], name) or '', '^(%d+%.%d+) ')
  if at and now[1] - tonumber(at) > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[1], name)
  end
end
"""

# KEYS[1] the hash; ARGV: worker, report, TTL of the hash in seconds
_REPORT = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] .. '.' .. string.format('%06d', now[2]) .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


def version() -> str:
    """Petiole's version; "" if it is not installed."""
    try:
        return installed("petiole")
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Exported:
    """In the type of a field of `WorkerReport`: the metric that `petiole metrics` makes of the field, by worker
    and model. A field of None has no value. `name` is without `petiole_`, and a counter's without `_total`.
    `vllm`: vLLM has a metric of this name with the same meaning (`petiole metrics --also vllm`). `by`: the label
    of a field that is a dictionary; "": it is a number."""

    kind: Literal["gauge", "counter"]
    name: str
    what: str
    vllm: bool = False
    by: str = ""


gauge, counter = partial(Exported, "gauge"), partial(Exported, "counter")
ENGINE = "Engine.stats"
"""In the type of a field: `Engine.stats()` has the figure under the field's name."""


class Histogram(NamedTuple):
    """A histogram that `petiole metrics` exports; vLLM has each. `bounds`: the upper bounds of its buckets."""

    name: str
    what: str
    bounds: tuple[float, ...]


WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 300.0, 900.0)
PAUSES_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
HISTOGRAMS = {
    "queue_s": Histogram(
        "request_queue_time_seconds",
        "Seconds from when a worker takes a task until the task has a place in the engine.",
        WAITS_S,
    ),
    "ttft_s": Histogram(
        "time_to_first_token_seconds", "Seconds from when a worker takes a task until its first token.", WAITS_S
    ),
    "per_output_token_s": Histogram(
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a generation, in seconds.",
        PAUSES_S,
    ),
    "total_s": Histogram(
        "e2e_request_latency_seconds", "Seconds from when a worker takes a task until its end.", WAITS_S
    ),
    "prompt_tokens": Histogram("request_prompt_tokens", "Prompt tokens of a generation.", TOKENS),
    "completion_tokens": Histogram("request_generation_tokens", "Tokens that a generation made.", TOKENS),
}
"""Distributions of ended generations, by their names in `WorkerReport.distributions`."""


class Distribution(BaseModel):
    """A histogram: `counts[i]` values are above `bounds[i - 1]` and at most `bounds[i]`; `sum` is the sum of all
    values."""

    bounds: list[float]
    counts: list[int]
    sum: float

    @model_validator(mode="after")
    def _counts_all(self) -> Distribution:
        if len(self.counts) != len(self.bounds) + 1:
            raise ValueError("must have a count for each bound, and one for what is above")
        return self


class Generating(BaseModel):
    """A generation that a worker has."""

    task_id: str
    age_s: float  # since the worker took it


class WorkerReport(BaseModel):
    """A worker's report. Counts are since the worker's start. `age_s` is filled in by the reader. The type of a
    field says which metric the field becomes, and whether the engine has the figure."""

    model_config = ConfigDict(defer_build=True, extra="allow", protected_namespaces=())

    worker: str
    state: str = "ready"  # ready, silenced (it takes from no queue), paused, reloading, draining
    version: str = ""  # Petiole's
    model: Annotated[str, ENGINE] = ""
    fingerprint: str = ""  # of the model's weights
    device: Annotated[str, ENGINE] = ""
    weight_format: Annotated[str, ENGINE] = ""  # of the weights in memory, that of the most weights first
    weight_bytes: Annotated[int, ENGINE, gauge("weight_bytes", "Memory of the model's weights.")] = 0
    kernels: Annotated[str, ENGINE] = ""  # that compute the model: compiled, torch, flashinfer
    instructions: Annotated[str, ENGINE] = ""  # of these kernels, such as avx2 or sm_90
    threads: Annotated[int, ENGINE] = 0  # of a step on a CPU
    queues: list[str] = []  # it takes tasks from, or will after a pause
    result_marker: str = ""  # the id of a result that it has stored (`fleet.availability`); empty: none yet
    slots: Annotated[int, ENGINE, gauge("num_slots", "Requests that may generate at the same time.")] = 0
    running: Annotated[int, ENGINE, gauge("num_requests_running", "Requests that generate.", vllm=True)] = 0
    waiting: Annotated[
        int,
        ENGINE,
        gauge("num_requests_waiting", "Requests that the worker has taken and that wait for a place.", vllm=True),
    ] = 0
    held_back: Annotated[
        int,
        ENGINE,
        gauge("num_requests_held_back", "Running requests that the step budget kept out of the last step."),
    ] = 0
    pages_total: Annotated[int, ENGINE] = 0
    pages_free: Annotated[int, ENGINE] = 0
    pages_cached: Annotated[int, ENGINE] = 0
    windows: dict[str, dict[str, int]] = {}  # pages and hits of the layers with a window, by window
    states: dict[str, int] = {}  # states, snapshots and hits of the layers that keep a state; empty: none does
    hit_rate: float = 0.0  # share of prompt tokens found in the prefix cache
    tokens_per_s: float = 0.0
    texts_per_s: float = 0.0  # of which vectors or scores are made
    lease_age_s: float = 0.0  # since the leases were last renewed
    streams_behind_s: Annotated[
        float, gauge("streams_behind_seconds", "Seconds for which Redis has not taken the worker's streams.")
    ] = 0.0  # 0 while flushes succeed
    prompt_tokens: Annotated[
        int, ENGINE, counter("prompt_tokens", "Prompt tokens computed, without those found in the prefix cache.")
    ] = 0
    generated_tokens: Annotated[int, ENGINE, counter("generation_tokens", "Tokens generated.", vllm=True)] = 0
    texts: Annotated[
        int, ENGINE, counter("texts", "Texts and pairs of texts of which vectors or scores were made.")
    ] = 0
    verifications: Annotated[
        int, ENGINE, counter("spec_decode_num_drafts", "Verifications of one sequence's drafts.", vllm=True)
    ] = 0
    draft_tokens: Annotated[
        int, ENGINE, counter("spec_decode_num_draft_tokens", "Tokens drafted for speculative decoding.", vllm=True)
    ] = 0
    accepted_draft_tokens: Annotated[
        int, ENGINE, counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", vllm=True)
    ] = 0
    accepted_drafts: Annotated[
        dict[str, int],
        counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place among the drafts of a verification, from 0.",
            vllm=True,
            by="position",
        ),
    ] = {}
    preemptions: Annotated[
        int, ENGINE, counter("num_preemptions", "Requests that were preempted, and computed again.", vllm=True)
    ] = 0
    steps: Annotated[int, ENGINE, counter("steps", "Steps of the engine.")] = 0
    evicted_pages: Annotated[int, ENGINE, counter("evicted_pages", "Pages evicted from the prefix cache.")] = 0
    kv_tier_bytes: Annotated[
        int | None, ENGINE, gauge("kv_tier_bytes", "Bytes of the tier's files, which a machine's workers share.")
    ] = None  # None: there is no tier
    kv_tier_restored_tokens: Annotated[
        int, ENGINE, counter("kv_tier_restored_tokens", "Prompt tokens whose KV came from the tier's files.")
    ] = 0
    kv_tier_saved_bytes: Annotated[
        int, ENGINE, counter("kv_tier_saved_bytes", "Bytes of KV written to the tier's files.")
    ] = 0
    kv_tier_dropped_chunks: Annotated[
        int,
        ENGINE,
        counter("kv_tier_dropped_chunks", "Chunks of KV that the tier could not save."),
    ] = 0
    kv_tier_given_up: Annotated[
        int, ENGINE, counter("kv_tier_given_up", "Reads of the tier's files that took too long.")
    ] = 0
    kv_tier_evicted: Annotated[
        int, ENGINE, counter("kv_tier_evicted_files", "Files that this worker has removed from the tier for room.")
    ] = 0
    kv_tier_damaged: Annotated[
        int, ENGINE, counter("kv_tier_damaged_files", "Damaged files that the tier has removed.")
    ] = 0
    kv_tier_failed: Annotated[
        int, ENGINE, counter("kv_tier_failures", "Reads and writes of the tier's files that failed.")
    ] = 0
    zombie_outputs: Annotated[
        int, ENGINE, counter("zombie_outputs", "Tokens sampled after the end of their sequence, and dropped.")
    ] = 0
    expert_imbalance: Annotated[
        float,
        ENGINE,
        gauge(
            "expert_imbalance",
            "Tokens of the busiest expert over those of the mean expert, on the average of layers; "
            "0 without experts.",
        ),
    ] = 0.0
    encoded_images: Annotated[int, ENGINE, counter("encoded_images", "Images encoded.")] = 0
    image_hits: Annotated[
        int, ENGINE, counter("image_hits", "Images found in the prefix cache: neither decoded nor encoded.")
    ] = 0
    feature_hits: Annotated[
        int,
        ENGINE,
        counter("image_feature_hits", "Images decoded, and not encoded again."),
    ] = 0
    encode_s: Annotated[
        float, ENGINE, counter("encode_seconds", "Seconds of encode steps, from launch to completion.")
    ] = 0.0
    held_messages: Annotated[
        int, gauge("num_held_messages", "Messages that the worker has taken and not acknowledged.")
    ] = 0
    pending_completions: Annotated[
        int, gauge("num_pending_completions", "Generations that ended, whose outcome is not stored yet.")
    ] = 0
    oldest_task_s: Annotated[
        float, gauge("oldest_task_seconds", "Seconds since the worker took its oldest task that is not completed.")
    ] = 0.0  # 0: it has none
    generations: list[Generating] = []  # the oldest that are not completed, at most GENERATIONS_SHOWN
    resumed_attempts: Annotated[int, counter("resumed_attempts", "Tasks that an earlier delivery had begun.")] = 0
    lost_leases: Annotated[
        int, counter("lost_leases", "Leases that the worker has lost, with the messages that it held.")
    ] = 0
    deaths: Annotated[
        int, counter("deaths", "Dead owners of messages, whose messages this worker has given back.")
    ] = 0
    redeliveries: Annotated[int, counter("redeliveries", "Messages that came again.")] = 0
    quarantined: Annotated[int, counter("quarantined", "Messages that the worker has refused.")] = 0
    failed_chords: Annotated[int, counter("failed_chords", "Chords whose body will not run.")] = 0
    redis_changes: Annotated[
        int,
        counter("redis_changes", "Times that another Redis process answered than before: failovers and restarts."),
    ] = 0
    redis_changed_s: float | None = None  # since the last of them
    open_batches: Annotated[int, gauge("open_batches", "Batches of the fleet that have not ended.")] = 0
    batch_runners: Annotated[int, gauge("batch_runners", "Batches whose rows this worker submits.")] = 0
    batch_rows_left: Annotated[int, gauge("batch_rows_left", "Rows of these batches that have not ended.")] = 0
    batch_rows_failed: Annotated[int, gauge("batch_rows_failed", "Rows of these batches that have failed.")] = 0
    memory_bytes: Annotated[int, gauge("memory_bytes", "Memory of the worker's process.")] = 0  # 0: unknown
    memory_left_bytes: Annotated[
        int | None, gauge("memory_left_bytes", "Memory left below the limit of the worker's container.")
    ] = None  # None without a limit
    disks: dict[str, float] = {}  # the free share of the disks that it uses, by a folder on each
    card_memory_bytes: Annotated[int | None, gauge("card_memory_bytes", "Memory of the card in use.")] = None
    card_power_w: Annotated[float | None, gauge("card_power_watts", "Power of the card.")] = None
    card_temperature_c: Annotated[int | None, gauge("card_temperature_celsius", "Temperature of the card.")] = None
    card_ecc_errors: Annotated[int | None, counter("card_ecc_errors", "Memory errors not corrected.")] = None
    card_xids: Annotated[int | None, counter("card_xids", "Xids of the driver.")] = None
    failed: dict[str, int] = {}  # failed tasks by whose fault it is: caller, server
    finished: dict[str, int] = {}  # ended generations, by finish reason
    cached_prompt_tokens: Annotated[
        int, counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache, of ended generations.")
    ] = 0
    distributions: dict[str, Distribution] = {}  # seconds and tokens of ended generations
    broker_s: dict[str, Distribution] = {}  # seconds that tasks waited in the broker, by priority
    age_s: float | None = None

    @property
    def pages_used(self) -> int:
        """Pages held by running sequences."""
        return self.pages_total - self.pages_free - self.pages_cached

    @property
    def lost(self) -> bool:
        return self.age_s is not None and self.age_s > LOST_AFTER_S


def report(client: redis.Redis, worker: WorkerReport) -> None:
    """Store a worker's report, in one round trip."""
    message = worker.model_dump_json(exclude={"age_s"})
    client.eval(_REPORT, 1, WORKERS_KEY, worker.worker, message, str(FORGOTTEN_AFTER_S))


def forget_lost(client: redis.Redis) -> None:
    """Remove the reports of workers that died more than an hour ago."""
    client.eval(FORGET, 1, WORKERS_KEY, str(FORGOTTEN_AFTER_S))


def withdraw(client: redis.Redis, worker: str) -> None:
    """Remove the report of a worker that shuts down."""
    client.hdel(WORKERS_KEY, worker)


def workers(client: redis.Redis | None = None) -> list[WorkerReport]:
    """The reports of the last hour, sorted by worker name."""
    client = client or connections.streams()
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(WORKERS_KEY)
        (seconds, microseconds), fields = pipe.execute()
    now = seconds + microseconds / 1e6
    reports = []
    for name, value in fields.items():
        at, _, message = value.partition(b" ")
        try:
            age_s = max(0.0, now - float(at))
            if age_s > FORGOTTEN_AFTER_S:
                continue
            worker = WorkerReport.model_validate_json(message)
        except ValueError as error:  # perhaps another version's: skip it, and show the others
            logger.warning("the report of %s cannot be read: %s", name.decode(errors="replace"), _in_a_line(error))
            continue
        reports.append(worker.model_copy(update={"age_s": round(age_s, 1)}))
    return sorted(reports, key=lambda worker: worker.worker)


def _in_a_line(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
