-- Let the log of a completed task expire soon: its stored result has all that is in the log.
--
-- KEYS  log, state
-- ARGV  how long the log stays for those who read it now, in ms; the attempt that has finished the task
-- reply 1 if the task is that attempt's, and finished; else nothing is changed
--
-- `retired` says that a log that is missing is no lost log: the task is completed, whether its result is still stored
-- or not.
local function retire()
  local log, state = KEYS[1], KEYS[2]
  if redis.call('HGET', state, 'attempt') ~= ARGV[2] or redis.call('HEXISTS', state, 'done') == 0 then
    return 0
  end
  redis.call('HSET', state, 'retired', 1)
  if redis.call('PTTL', log) > tonumber(ARGV[1]) then
    redis.call('PEXPIRE', log, ARGV[1])
  end
  return 1
end

return unless_damaged(retire) or 0
