-- Begin a delivery of each task: increment its fencing number (attempt) and read the state of earlier deliveries.
--
-- KEYS  four per task: log, state, completion, asked
-- ARGV  ttl_ms, model, number of leading tasks to mark as running, a name of this call (the same if the call is
--       repeated), the worker's name; then four per task: Celery's retry count, the message's name ('': it has none),
--       1 if the broker says that the message is redelivered, the attempt's span as `traceparent` ('': none)
-- reply one per task: {attempt, deaths, cancel, model, adapter, done, log entries, what is known of the attempt before
--       ('': nothing), 1 if that one has died}; attempt is 0 if the task is finished; {} if its keys are damaged,
--       which does not affect the other tasks
--
-- `running` marks a task that was admitted and has neither ended nor been handed back. If it is set when a message
-- is begun again, a worker died (or was disconnected) while it ran the task. If the message is new, the task id was
-- used twice, which does not count as a death. `message:NAME` holds the last call that has begun a message. So the count
-- does not depend on the content of the message, and a call that is repeated after a lost reply counts no death.
-- Tasks that get a place at once are marked here, before the engine gets them, because they may kill the worker
-- before it can mark them. An explicit Celery retry starts a new stream: log and progress are deleted, but the attempt
-- keeps counting. `begun:ATTEMPT` says when the attempt began, why (`new`, `died`: the one before has died, `again`), its
-- span or '-', and the worker (`record.codec`). While the log is empty, each delivery sets the model and replaces what publish.lua stores as `prepared`; the
-- adapter is written with the first entry.
local ttl, model, at_once, call, worker = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]

local function begin(i)
  local log, state, completion, asked = unpack(KEYS, 4 * i - 3, 4 * i)
  local retries, message = tonumber(ARGV[2 + 4 * i]), 'message:' .. ARGV[3 + 4 * i]
  local again, span = ARGV[4 + 4 * i] == '1', ARGV[5 + 4 * i]
  local known = redis.call('HGET', state, 'retries')
  if known and retries > whole(known) then
    redis.call('DEL', log, completion)
    redis.call('HDEL', state, 'running', 'done', 'model', 'adapter', 'deaths', 'prepared', 'retired')
  end
  local was = redis.call('HMGET', state, 'running', 'done', 'model', 'adapter', 'deaths', message)
  local cancel = redis.call('HGET', asked, 'cancel')
  local attempt, deaths, died, before = 0, whole(was[5] or 0), false, false
  local entries = redis.call('LRANGE', log, 0, -1)
  if not was[2] then
    attempt = redis.call('HINCRBY', state, 'attempt', 1)
    if was[1] and (was[6] or again) and was[6] ~= call then
      deaths, died = redis.call('HINCRBY', state, 'deaths', 1), true
    end
    if worker ~= '' then
      before = attempt > 1 and redis.call('HGET', state, 'begun:' .. attempt - 1)
      local why = died and 'died' or attempt > 1 and 'again' or 'new'
      local entry = {milliseconds(), why, span ~= '' and span or '-', worker}
      redis.call('HSET', state, 'begun:' .. attempt, table.concat(entry, ' '))
    end
    if message == 'message:' then
      redis.call('HSET', state, 'retries', retries)
    else
      redis.call('HSET', state, 'retries', retries, message, call)
    end
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
  return {attempt, deaths, cancel or '', was[3] or '', was[4] or '', was[2] or '', entries, before or '', died and 1 or 0}
end

local replies = {}
for i = 1, #KEYS / 4 do
  replies[i] = unless_damaged(begin, i) or {}
end
return replies
