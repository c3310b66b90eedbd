-- One flush of all streams: for each task check the fencing number, append to the log, publish.
--
-- KEYS  two a task: log, state
-- ARGV  ttl_ms, then five a task: attempt, flags, index, next, payload; and `done` after a payload that ends it
-- reply only what is not as expected, three numbers a task: position of the task, code, the log's next index
--
-- flags  1 admitted: the attempt now runs        2 a payload: the delta [index, next)
--        4 it is the last: `done` follows        8 handed back: the attempt no longer runs
--       16 refresh the TTLs                     32 cancel when no reader shows interest
-- codes  1 stale: a newer attempt owns the task   2 the log does not end at `index`
--         3 the cancel flag is set                4 nobody reads the stream any more
--
-- A repeated call is harmless: what was appended shows in `next`, what was finished in `done`.
local ttl = ARGV[1]
local reply, a = {}, 2
for k = 1, #KEYS, 2 do
  local log, state = KEYS[k], KEYS[k + 1]
  local attempt, flags, index, after, payload = ARGV[a], tonumber(ARGV[a + 1]), ARGV[a + 2], ARGV[a + 3], ARGV[a
  + 4] a = a + 5
  local done = false
  if flags % 8 >= 4 then
    done = ARGV[a]
    a = a + 1
  end
  local was = redis.call('HMGET', state, 'attempt', 'next', 'cancel', 'done')
  local code, owner, at = 0, was[1], was[2] or '0'
  if owner and owner ~= attempt and tonumber(owner) > tonumber(attempt) then
    code = 1
  elseif was[4] then
    code = owner ~= attempt and 1 or 0
  elseif flags % 4 >= 2 and at ~= index then
    code = 2
  else
    if flags % 4 >= 2 then
      redis.call('RPUSH', log, payload)
      if done then
        redis.call('HSET', state, 'attempt', attempt, 'next', after, 'done', done)
        redis.call('HDEL', state, 'running')
      elseif flags % 2 >= 1 then
        redis.call('HSET', state, 'attempt', attempt, 'next', after, 'running', attempt)
      else
        redis.call('HSET', state, 'next', after)
      end
      redis.call('PUBLISH', string.sub(log, 1, -4) .. 'ch', payload)
    elseif flags % 2 >= 1 then
      redis.call('HSET', state, 'attempt', attempt, 'running', attempt)
    end
    if flags % 16 >= 8 then
      redis.call('HDEL', state, 'running')
    end
    if flags % 32 >= 16 then
      redis.call('PEXPIRE', log, ttl)
      redis.call('PEXPIRE', state, ttl)
    end
    if not done then
      if was[3] then
        code = 3
      elseif flags >= 32 and redis.call('EXISTS', string.sub(log, 1, -4) .. 'interest') == 0 then
        code = 4
      end
    end
  end
  if code ~= 0 then
    reply[#reply + 1] = (k + 1) / 2 - 1
    reply[#reply + 1] = code
    reply[#reply + 1] = tonumber(at)
  end
end
return reply
