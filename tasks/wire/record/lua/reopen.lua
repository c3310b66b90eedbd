-- Forget the end that the refusal of its message has given a task, so that the message can be sent again.
--
-- KEYS  log, state, completion, completer, runs
-- ARGV  that end
-- reply OPEN: the task has no end, or none any longer; RUNS; ENDED: by something else. Only the first changes anything.
local state = KEYS[2]
if redis.call('HEXISTS', state, 'running') == 1 or whole(redis.call('GET', KEYS[5]) or 0) > 0 then
  return RUNS
end
local done = redis.call('HGET', state, 'done')
if not done then
  return OPEN
elseif done ~= ARGV[1] then
  return ENDED
end
redis.call('DEL', unpack(KEYS, 1, 4))
return OPEN
