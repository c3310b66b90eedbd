-- Stands before every script: functions for damaged keys, into which somebody else has written.
--
-- A key is damaged if it has another type than a command expects, or does not hold a number where one is expected. A
-- script goes on with all other keys, and names the damaged key in its reply. A script with only one key fails with an
-- error that `tasks.servers.replies` recognises. Errors of the server, such as a full one, always end the script.

local function is_damage(problem)
  local message = type(problem) == 'table' and problem.err or problem
  return string.find(message, 'WRONGTYPE') or string.find(message, 'not an integer')
    or string.find(message, 'would overflow')
end

-- The results of `work`, up to three values, or nil if it meets a damaged key.
local function unless_damaged(work, ...)
  local done, first, second, third = pcall(work, ...)
  if done then
    return first, second, third
  elseif not is_damage(first) then
    error(first, 0)
  end
end

local function whole(text)
  return tonumber(text) or error('not an integer')
end

-- This server's time.
local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Correct what limits have counted: how many tokens more than they have held, in and out. What was held too much goes
-- back to its slot, if that is still counted; what was used beyond it counts from now on.
local function correct(used, more, held)
  local fields, values, now = {}, {}, nil
  for place, kind in ipairs({'input:', 'output:'}) do
    if more[place] > 0 then
      now = now or math.floor(milliseconds() / held[4])
      fields[#fields + 1], values[#values + 1] = kind .. now, more[place]
    elseif more[place] < 0 then
      fields[#fields + 1], values[#values + 1] = kind .. held[3], more[place]
    end
  end
  if #fields == 0 then
    return
  end
  local known, changed = redis.call('HMGET', used, unpack(fields)), {}
  for i, field in ipairs(fields) do
    if known[i] or values[i] > 0 then
      changed[#changed + 1], changed[#changed + 2] = field, whole(known[i] or 0) + values[i]
    end
  end
  if #changed > 0 then
    redis.call('HSET', used, unpack(changed))
  end
  if now then
    redis.call('EXPIRE', used, 120)
  end
end

-- Enter the end of a task in the ledger, and give back what its tenant's limits hold for it: see `record.ledger`.
-- Called once for each end. What fails here must not hold a stream, so its callers go on after an error.
--
-- keys   from `first` on: the day's entries, the day's sums, twice what was used and what runs: of the tenant, of its
--        key; what webhooks watch
-- entry  JSON. `prompt` is null if this attempt has not counted the prompt: then what announced the task says it
local function enter(keys, first, state, entry)
  local call, told = redis.call, cjson.decode(entry)
  local field = told.task
  if told.prompt == cjson.null then
    local prepared = call('HGET', state, 'prepared')
    told.prompt = prepared and cjson.decode(prepared).prepared.prompt_tokens or 0
    entry = cjson.encode(told)
  end
  local entries, sums, kept = keys[first], keys[first + 1], told.days * 86400
  if told.tenant ~= '' and kept > 0 then
    if call('HEXISTS', entries, field) == 1 then  -- a task that Celery has sent again has used its tokens again
      field = field .. '#' .. told.attempt
    end
    call('HSET', entries, field, entry)
    call('EXPIRE', entries, kept)
  end
  local of = cjson.encode({told.tenant, told.model}) .. ' '
  call('HINCRBY', sums, of .. 'requests', 1)
  for _, what in ipairs({'prompt', 'cached', 'output', 'reasoning'}) do
    if told[what] > 0 then
      call('HINCRBY', sums, of .. what, told[what])
    end
  end
  call('HINCRBY', sums, of .. 'end ' .. told['end'], 1)
  call('EXPIRE', sums, math.max(kept, 400 * 86400))
  if told.held then
    for of_whom = first + 2, first + 4, 2 do
      call('ZREM', keys[of_whom + 1], told.task)
      correct(keys[of_whom], {told.prompt - told.held[1], told.output - told.held[2]}, told.held)
    end
  end
  call('ZADD', keys[first + 6], 'XX', 0, told.tenant ~= '' and told.tenant .. '/' .. told.task or told.task)
end

-- The length of a log, and the index at which its next delta begins: UNKNOWN behind an entry that is nobody's delta.
-- It is below 0 behind a delta of the prompt.
local UNKNOWN = -2147483648

local function length_and_end(log)
  local entry = redis.call('LINDEX', log, -1)
  if not entry then
    return 0, 0
  end
  local read, ends = pcall(function()
    local delta = cjson.decode(entry)
    return delta.index + #delta.token_ids
  end)
  return redis.call('LLEN', log), read and ends or UNKNOWN
end
