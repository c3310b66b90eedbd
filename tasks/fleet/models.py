"""The models of a fleet: what each takes, and in which queue, so that a producer can ask for a model by its name.

Each worker writes a field of the hash `MODELS_KEY` with its reports: under the model's fingerprint and the
worker's queues, the time by Redis's clock, the time of the first such entry, and the facts as JSON. Workers of one
model and the same queues write the same field. An entry is *live* while a worker refreshes it, and stays for
`KEPT_S` after the last one has left: a gateway can queue for a fleet that is scaled to zero.

What a queue serves:

1. If live entries name the queue, these. So a model that a deploy has replaced is no longer found. An entry whose
   writer has written a newer one was replaced by a reload.
2. Otherwise the newest entry that names it.

A name leads to a queue only if all that the queue serves has that name: a task may run on any worker of its queue.
So two models share a queue under common names, and each has a queue of its own beside it (`own_queue`), from which
its workers take as well: all whose models have the same first name. A model on several queues is asked for on a
live one, and there on the producer's own queue first.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from petiole.contract.settings.urls import redacted
from petiole.tasks.errors import InvalidRequest, Unavailable
from petiole.tasks.fleet import loaded_adapters, reports
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import ADAPTERS_KEY, MODELS_KEY, is_beside

logger = logging.getLogger(__name__)

KEPT_S = 7 * 86_400
KNOWN_FOR_S = 5.0
"""How long a process uses what it has read."""
UNKNOWN_FOR_S = 1.0
"""How soon it reads again for a name that it does not know."""

# KEYS[1] the hash; ARGV: field, facts, TTL of the hash in seconds
_PUBLISH = """
local now = redis.call('TIME')
local at = now[1] .. '.' .. string.format('%06d', now[2])
local first = string.match(redis.call('HGET', KEYS[1], ARGV[1]) or '', '^%d+%.%d+ (%d+%.%d+) ') or at
redis.call('HSET', KEYS[1], ARGV[1], at .. ' ' .. first .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""


class ModelFacts(BaseModel):
    """What the workers of a model say of it. `since` and `age_s` are filled in by the reader."""

    model_config = ConfigDict(defer_build=True, extra="allow", protected_namespaces=())

    fingerprint: str
    """A digest of the checkpoint's contents and its quantisation while loading."""
    model: str = ""
    """The worker's `PETIOLE_MODEL`."""
    names: list[str] = []
    """The names under which producers ask for it."""
    engine: str = ""
    """Whose engine, if not Petiole's."""
    owned_by: str = ""
    """Who published the checkpoint, if it is from the hub."""
    queues: list[str] = []
    """The queues of its workers."""
    own_queues: list[str] = []
    """Beside each of them the queue of this model alone."""
    adapters: dict[str, str] = {}
    """By name, the adapters of `PETIOLE_SERVED_ADAPTERS`, and those loaded over HTTP."""
    takes_adapters: bool = False
    """Whether requests may name other adapters."""
    loaded_adapters: list[str] = []
    """The adapters of that worker's last requests."""
    max_model_len: int = 0
    """The most tokens of prompt and output."""
    vocab_size: int = 0
    """The number of token ids."""
    chat: bool = False
    """Whether it answers conversations."""
    images: bool = False
    """Whether it takes images."""
    tools: bool = False
    """Whether its chat template shows tools."""
    reasoning: bool = False
    """Whether its chat template knows reasoning."""
    embeddings: bool = False
    """Whether it makes vectors of texts."""
    dimensions: int = 0
    """The numbers of such a vector."""
    prompts: list[str] = []
    """The names of prompts before a text."""
    labels: list[str] = []
    """The labels of a classifier; a reranker has one."""
    response_template: dict[str, Any] | None = None
    """How its output is divided: `response_template` in tokenizer_config.json."""
    tool_format: str | None = None
    """The format of its reasoning and tool calls. See docs/tools.md#families."""
    special_tokens: dict[str, str] = {}
    """The texts of its special tokens, by id."""
    worker: str = ""
    """The worker that wrote this last."""
    version: str = ""
    """The worker's version of Petiole."""
    since: float = 0.0
    """When the first worker wrote this, by Redis's clock."""
    age_s: float = 0.0
    """How long ago the last one wrote it."""

    @property
    def live(self) -> bool:
        """Whether a worker serves it now."""
        return self.age_s <= reports.LOST_AFTER_S


class ModelRoute(NamedTuple):
    """Where to submit a task for a model. `adapter`: the one that the name means. `makes_vectors`: see
    `ModelFacts.embeddings`."""

    queue: str
    adapter: str | None
    makes_vectors: bool = False


# ---------------------------------------------------------------- workers


def publish(client: redis.Redis, facts: ModelFacts) -> None:
    """Store the facts, in one round trip."""
    field = f"{facts.fingerprint} {','.join(sorted(facts.queues))}"
    client.eval(_PUBLISH, 1, MODELS_KEY, field, facts.model_dump_json(exclude={"since", "age_s"}), str(KEPT_S))


def forget_old(client: redis.Redis) -> None:
    """Remove the facts that no worker has refreshed for `KEPT_S`."""
    client.eval(reports.FORGET, 1, MODELS_KEY, str(KEPT_S))


# ---------------------------------------------------------------- readers


def models(client: redis.Redis | None = None) -> list[ModelFacts]:
    """The models of the last days, the live ones first."""
    client = client or connections.streams()
    with client.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(MODELS_KEY)
        pipe.hgetall(ADAPTERS_KEY)
        return _read(*pipe.execute())


async def amodels() -> list[ModelFacts]:
    """`models` for asyncio."""
    async with connections.async_streams().pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hgetall(MODELS_KEY)
        pipe.hgetall(ADAPTERS_KEY)
        return _read(*await pipe.execute())


def _read(
    clock: tuple[int, int], fields: Mapping[bytes, bytes], of_adapters: Mapping[bytes, bytes]
) -> list[ModelFacts]:
    now, loaded = clock[0] + clock[1] / 1e6, loaded_adapters.read(of_adapters)
    found: list[ModelFacts] = []
    for name, value in fields.items():
        try:
            at, since, facts = value.split(b" ", 2)
            age_s = max(0.0, now - float(at))
            if age_s > KEPT_S:
                continue
            read = ModelFacts.model_validate_json(facts)
            named = loaded_adapters.of_model(loaded, read.names) if read.takes_adapters else {}
            seen = {"age_s": round(age_s, 1), "since": float(since), "adapters": named | read.adapters}
            found.append(read.model_copy(update=seen))
        except ValueError as error:  # perhaps another version's: skip it, and show the others
            logger.warning("the facts of %s cannot be read: %s", name.decode(errors="replace"), _kind(error))
    return sorted(found, key=lambda model: (not model.live, model.names, model.queues, model.fingerprint))


def _kind(error: ValueError) -> str:
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)


# ---------------------------------------------------------------- from a name to a queue


def served(known: Iterable[ModelFacts], queue: str) -> list[ModelFacts]:
    """What this queue serves, the newest entry first."""
    writers = dict[str, ModelFacts]()
    for model in sorted((model for model in known if queue in model.queues), key=lambda model: model.age_s):
        writers.setdefault(model.worker, model)
    of = list(writers.values())
    return [model for model in of if model.live] or of[:1]


def find(known: Sequence[ModelFacts], name: object, own: str, queue: str | None = None) -> ModelRoute:
    """Where the model of this name is served. `own`: the producer's. `queue`: the only one to look at, if it
    is given. The name of a live model is no adapter's. Raises `InvalidRequest`, which names the models that there
    are."""
    queues = {one for model in known for one in model.queues} if queue is None else {queue}
    name = str(name)
    serving = {one: served(known, one) for one in queues}
    as_model = any(model.live and name in model.names for of in serving.values() for model in of)

    def answers(model: ModelFacts) -> bool:
        return name in model.names or (not as_model and name in model.adapters)

    having = {one: of for one, of in serving.items() if any(map(answers, of))}
    alone = {one: of for one, of in having.items() if all(map(answers, of))}
    found = [((not of[0].live, False, one != own, one), one, of[0]) for one, of in alone.items()]
    for one in having.keys() - alone.keys():
        for model in having[one]:
            beside = next((own for own in model.own_queues if is_beside(own, one)), None)
            takers = [other for other in having[one] if beside in other.own_queues]
            if beside is not None and all(map(answers, takers)):
                found.append(((not model.live, True, one != own, beside), beside, model))
    if found:
        _, best, model = min(found, key=lambda ranked: ranked[0])
        return ModelRoute(best, None if name in model.names else model.adapters[name], model.embeddings)
    if having:
        one, of = min(having.items())
        named = {one for model in of if answers(model) for one in model.names}
        apart = ([one for one in model.names if one not in named] for model in of if not answers(model))
        others = ", ".join(names[0] for names in apart if names)
        limit = f"must be a name of all models of its queue; queue {one!r} has {others or 'others'}, too"
        raise InvalidRequest("model", limit, name)
    names = sorted({one for of in serving.values() for model in of for one in (*model.names, *model.adapters)})
    where = "" if queue is None else f" of queue {queue!r}"
    limit = f"must be a model{where}: {', '.join(names)}" if names else f"no worker has served a model{where} yet"
    raise InvalidRequest("model", limit, name)


class Directory:
    """The models that a process has read recently. Thread-safe."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._of: tuple[float, str, list[ModelFacts]] = (float("-inf"), "", [])

    def find(self, name: object, own_queue: str, queue: str | None = None) -> ModelRoute:
        """`find`, in what was read recently or is read now. Raises `Unavailable`, too."""
        try:
            return find(self._known(KNOWN_FOR_S), name, own_queue, queue)
        except InvalidRequest:
            return find(self._known(UNKNOWN_FOR_S), name, own_queue, queue)

    def _known(self, for_s: float) -> list[ModelFacts]:
        with self._reading:
            read_at, url, known = self._of
            if time.monotonic() - read_at > for_s or url != settings().streams_url:
                known = self._read()
                self._of = time.monotonic(), settings().streams_url, known
            return known

    def _read(self) -> list[ModelFacts]:
        try:
            return models()
        except redis.exceptions.NoPermissionError as error:
            limit = f"needs the right to read {MODELS_KEY} and {ADAPTERS_KEY}"
            raise InvalidRequest("model", limit, str(error)) from None
        except connections.LOST as error:
            raise Unavailable(redacted(settings().streams_url), str(error)) from None


directory = Directory()
"""This process's."""


def _after_fork() -> None:
    global directory
    directory = Directory()  # a thread of the parent may have been reading


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
