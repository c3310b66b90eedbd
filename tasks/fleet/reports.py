"""Workers' reports, as `petiole status` shows them.

Every `REPORT_INTERVAL_S` each worker writes its field of the hash `WORKERS_KEY`: the time of the report by
Redis's clock, a space, and the report as JSON. So the ages of all reports are comparable even if the hosts' clocks
differ. A worker that shuts down removes its field; one that dies is shown as lost, and removed after an hour.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import redis
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from petiole.tasks.keys import WORKERS_KEY
from petiole.tasks.servers import connections

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
    """A worker's report. Counts are since the worker's start. `age_s` is filled in by the reader."""

    model_config = ConfigDict(defer_build=True, extra="allow", protected_namespaces=())

    worker: str
    state: str = "ready"  # ready, silenced (it takes from no queue), paused, reloading, draining
    version: str = ""  # Petiole's
    model: str = ""
    fingerprint: str = ""  # of the model's weights
    device: str = ""
    weight_format: str = ""  # of the weights in memory, that of the most weights first
    weight_bytes: int = 0
    kernels: str = ""  # that compute the model: compiled, torch, flashinfer
    instructions: str = ""  # of these kernels, such as avx2 or sm_90
    threads: int = 0  # of a step on a CPU
    queues: list[str] = []  # it takes tasks from, or will after a pause
    result_marker: str = ""  # the id of a result that it has stored (`fleet.markers`); empty: none yet
    slots: int = 0
    running: int = 0
    waiting: int = 0
    held_back: int = 0  # of the running: the step budget keeps them out of the last step
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    windows: dict[str, dict[str, int]] = {}  # pages and hits of the layers with a window, by window
    states: dict[str, int] = {}  # states, snapshots and hits of the layers that keep a state; empty: none does
    hit_rate: float = 0.0  # share of prompt tokens found in the prefix cache
    tokens_per_s: float = 0.0
    texts_per_s: float = 0.0  # of which vectors or scores are made
    lease_age_s: float = 0.0  # since the leases were last renewed
    streams_behind_s: float = 0.0  # since the first failed flush of the streams; 0 while flushes succeed
    prompt_tokens: int = 0  # computed: those found in the prefix cache are not included
    generated_tokens: int = 0
    texts: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    evicted_pages: int = 0  # of the prefix cache
    zombie_outputs: int = 0  # tokens that were sampled after their sequence had ended
    expert_imbalance: float = 0.0  # of a mixture of experts: the busiest expert's tokens over the mean expert's
    encoded_images: int = 0
    image_hits: int = 0  # images whose KV was cached: neither decoded nor encoded
    encode_s: float = 0.0  # of all encode steps, from launch to completion
    held_messages: int = 0
    pending_completions: int = 0  # generations that have ended, and whose outcome is not stored yet
    oldest_task_s: float = 0.0  # since the worker took the oldest task that is not completed; 0: it has none
    generations: list[Generating] = []  # the oldest that are not completed, at most GENERATIONS_SHOWN
    resumed_attempts: int = 0  # tasks that an earlier delivery had begun
    lost_leases: int = 0
    deaths: int = 0  # owners of tasks whose messages this worker has given back
    redeliveries: int = 0
    quarantined: int = 0  # messages that this worker has refused
    failed_chords: int = 0  # chords whose body will not run
    memory_bytes: int = 0  # of the worker's process; 0 where the system does not say
    memory_left_bytes: int | None = None  # below the container's limit; None without a limit
    failed: dict[str, int] = {}  # failed tasks by whose fault it is: caller, server
    finished: dict[str, int] = {}  # ended generations, by finish reason
    cached_prompt_tokens: int = 0  # of ended generations
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
