-- Claim the completion of a task, unless somebody has claimed or recorded it.
--
-- KEYS  completion
-- ARGV  ttl_ms
-- reply 1 claimed; 0 claimed or completed by somebody; 2 claimed over a value that is neither
local kind = redis.call('TYPE', KEYS[1]).ok
local value = kind == 'string' and redis.call('GET', KEYS[1])
if value == 'claimed' or value == 'done' then
  return 0
end
redis.call('SET', KEYS[1], 'claimed', 'PX', ARGV[1])
return kind == 'none' and 1 or 2
