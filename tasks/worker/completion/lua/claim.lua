-- Claim the completion of a task, unless somebody has claimed or recorded it.
--
-- KEYS  completion
-- ARGV  ttl_ms
-- reply CLAIMED; NOT_CLAIMED: somebody has claimed or completed it; OVERWRITTEN: claimed over a value that is neither
local kind = redis.call('TYPE', KEYS[1]).ok
local value = kind == 'string' and redis.call('GET', KEYS[1])
if value == 'claimed' or value == 'done' then
  return NOT_CLAIMED
end
redis.call('SET', KEYS[1], 'claimed', 'PX', ARGV[1])
return kind == 'none' and CLAIMED or OVERWRITTEN
