"""When each worker was started, how often, and how its previous process ended, so that a crash loop is seen.

The hash `LIVES_KEY` has a field for each worker's name, as JSON. The field stays when the worker ends. A worker
writes its field before it loads its model, and again when its process exits in an orderly way. If the second entry
is missing, the process was killed. Names that have not been started for `KEPT_S` are removed."""

from __future__ import annotations

import json
import logging
from typing import Any

import redis
from pydantic import BaseModel

from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import LIVES_KEY

logger = logging.getLogger(__name__)

KEPT_S = 7 * 86_400

# KEYS[1] the hash; ARGV: worker, seconds after which names are removed
_BEGIN = """
local now, lives = tonumber(redis.call('TIME')[1]), redis.call('HGETALL', KEYS[1])
local starts, last_exit = 0, ''
for i = 1, #lives, 2 do
  local read, life = pcall(cjson.decode, lives[i + 1])
  local known = read and type(life) == 'table' and tonumber(life.started_at)
  if lives[i] == ARGV[1] and known then
    starts, last_exit = tonumber(life.starts) or 0, life.exit or 'killed'
  elseif not known or now - known > tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], lives[i])
  end
end
local life = cjson.encode({started_at = now, starts = starts + 1, last_exit = last_exit})
redis.call('HSET', KEYS[1], ARGV[1], life)
redis.call('EXPIRE', KEYS[1], ARGV[2])
return life
"""

# KEYS[1] the hash; ARGV: worker, how it ends
_END = """
local read, life = pcall(cjson.decode, redis.call('HGET', KEYS[1], ARGV[1]) or '')
if read and type(life) == 'table' then
  life.exit = ARGV[2]
  redis.call('HSET', KEYS[1], ARGV[1], cjson.encode(life))
end
"""


class Life(BaseModel):
    """A worker's name, when its process started, and how the previous process of that name ended: its exit status,
    or `killed`; empty at the first start."""

    started_at: float
    starts: int
    last_exit: str = ""

    @property
    def failed(self) -> bool:
        """Whether the previous process ended in another way than a shutdown."""
        return self.last_exit not in ("", "0")


def begin(client: redis.Redis, worker: str) -> Life:
    """Record a start. Returns what is recorded."""
    return Life.model_validate_json(client.eval(_BEGIN, 1, LIVES_KEY, worker, str(KEPT_S)))


def end(client: redis.Redis, worker: str, how: str) -> None:
    client.eval(_END, 1, LIVES_KEY, worker, how)


def lives(client: redis.Redis | None = None) -> dict[str, Life]:
    """By worker name. Unreadable entries are left out. Empty for a Redis user without the right to read them."""
    found = {}
    try:
        fields: Any = (client or connections.streams()).hgetall(LIVES_KEY)
    except redis.exceptions.NoPermissionError:
        return {}
    for name, life in fields.items():
        try:
            found[name.decode(errors="replace")] = Life.model_validate(json.loads(life))
        except (ValueError, RecursionError) as error:
            known = name.decode(errors="replace")
            logger.warning("the starts of %s cannot be read: %s", known, type(error).__name__)
    return dict(sorted(found.items()))
