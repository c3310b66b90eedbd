-- One flush of all streams: for each task check the fencing number, append to the log, publish.
--
-- KEYS  two a task: log, state
-- ARGV  ttl_ms, then four a task: flags, before, after, payload; and `done` behind a payload that is the last
-- reply only what is not as expected, three numbers a task: position of the task, code, where the log ends
--
-- `head` in the state says who owns the log and where it ends, "ATTEMPT/NEXT", with "/done" behind it at the
-- end. A delta is written if the head is as it was `before`, and leaves it as it shall be `after`. So one
-- comparison finds out stale attempts, gaps and ends; only then is looked further. A repeated call changes
-- nothing.
--
-- flags  1 admitted: the attempt now runs        2 a payload: a delta
--        4 it is the last: `done` follows        8 handed back: the attempt no longer runs
--       16 refresh the TTLs                     32 cancel when no reader shows interest
-- codes  1 stale: a newer attempt owns the task   2 the log does not end where it should
--        3 the cancel flag is set                 4 nobody reads the stream any more

-- Why `head` is not `before`: code, where the log ends.
local function differs(head, before)
  local mine, from = string.match(before, '^(%d+)/(%d+)')
  if not head then  -- the state has expired, or Redis has lost it
    return from == '0' and 0 or 2, 0
  end
  local owner, ends, done = string.match(head, '^(%d+)/(%d+)(.*)')
  if tonumber(owner) > tonumber(mine) or (done ~= '' and owner ~= mine) then
    return 1, 0
  elseif done ~= '' then
    return -1, 0  -- our own end, said again
  end
  return ends == from and 0 or 2, tonumber(ends)
end

local ttl = ARGV[1]
local reply, a = {}, 2
for k = 1, #KEYS, 2 do
  local log, state = KEYS[k], KEYS[k + 1]
  local flags, before, after, payload = tonumber(ARGV[a]), ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  a = a + 4
  local last = flags % 8 >= 4
  local was = redis.call('HMGET', state, 'head', 'cancel')
  local code, ends = 0, 0
  if was[1] ~= before then
    code, ends = differs(was[1], before)
    if flags % 4 < 2 and code == 2 then
      code = 0
    end
  end
  if code == 0 then
    if flags % 4 >= 2 then
      redis.call('RPUSH', log, payload)
      redis.call('HSET', state, 'head', after)
      if not was[1] then
        redis.call('HSET', state, 'attempt', string.match(before, '^%d+'))
      end
      redis.call('PUBLISH', string.sub(log, 1, -4) .. 'ch', payload)
    end
    if flags ~= 2 then
      if last then
        redis.call('HSET', state, 'done', ARGV[a])
      elseif flags % 2 >= 1 then
        redis.call('HSET', state, 'running', 1)
      end
      if last or flags % 16 >= 8 then
        redis.call('HDEL', state, 'running')
      end
      if flags % 32 >= 16 then
        redis.call('PEXPIRE', log, ttl)
        redis.call('PEXPIRE', state, ttl)
      end
      if flags >= 32 and redis.call('EXISTS', string.sub(log, 1, -4) .. 'interest') == 0 then
        code = 4
      end
    end
    if was[2] then
      code = 3
    end
    if last then
      code = 0
    end
  end
  if last then
    a = a + 1
  end
  if code > 0 then
    reply[#reply + 1] = (k + 1) / 2 - 1
    reply[#reply + 1] = code
    reply[#reply + 1] = ends
  end
end
return reply
