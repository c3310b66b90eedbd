-- A delivery begins: take the next fencing number of each task and read what earlier deliveries left.
--
-- KEYS  two a task: log, state
-- ARGV  ttl_ms, model, how many of these tasks run at once, then two a task: Celery's retry count, 1 if the
--       message was another worker's before
-- reply one a task: {attempt, deaths, cancel, model, adapter, done, log entries}, attempt 0 when it is done
--
-- `running` marks a task that was admitted and has neither ended nor been handed back. If it is there when its
-- message is delivered again, a worker died (or was cut off) over this task; with a message that is new, somebody
-- has used a task id twice. A task for which there is room is marked
-- here, before the engine sees it: it may not live long enough to say so. An explicit Celery retry is a new
-- stream: log and progress are dropped; the fencing number goes on counting. While the log is empty, the stream is
-- its newest worker's: the model is written only then, and the adapter with the first entry.
local ttl, model, at_once = ARGV[1], ARGV[2], tonumber(ARGV[3])
local replies = {}
for i = 1, #KEYS / 2 do
  local log, state = KEYS[2 * i - 1], KEYS[2 * i]
  local retries, again = tonumber(ARGV[2 + 2 * i]), ARGV[3 + 2 * i] == '1'
  local known = redis.call('HGET', state, 'retries')
  if known and retries > tonumber(known) then
    redis.call('DEL', log)
    redis.call('HDEL', state, 'running', 'done', 'model', 'adapter', 'deaths')
  end
  local was = redis.call('HMGET', state, 'running', 'done', 'cancel', 'model', 'adapter', 'deaths')
  local attempt, deaths = 0, tonumber(was[6] or 0)
  local entries = redis.call('LRANGE', log, 0, -1)
  if not was[2] then
    attempt = redis.call('HINCRBY', state, 'attempt', 1)
    if was[1] and again then
      deaths = redis.call('HINCRBY', state, 'deaths', 1)
    end
    redis.call('HSET', state, 'retries', retries)
    if i <= at_once then
      redis.call('HSET', state, 'running', 1)
    else
      redis.call('HDEL', state, 'running')
    end
    if #entries == 0 then
      redis.call('HSET', state, 'model', model)
    end
    redis.call('PEXPIRE', state, ttl)
    redis.call('PEXPIRE', log, ttl)
  end
  replies[i] = {attempt, deaths, was[3] or '', was[4] or '', was[5] or '', was[2] or '', entries}
end
return replies
