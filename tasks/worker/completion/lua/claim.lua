-- Claim the completion of a task, unless somebody else has claimed it, or somebody has recorded it.
--
-- KEYS  completion, completer
-- ARGV  ttl_ms, the completion that claims
-- reply CLAIMED, also if it was claimed by an earlier call; NOT_CLAIMED: somebody else has claimed it, or it is
--       recorded; OVERWRITTEN: claimed over a value that is neither
local kind = redis.call('TYPE', KEYS[1]).ok
local value = kind == 'string' and redis.call('GET', KEYS[1])
local again = value == 'claimed' and unless_damaged(redis.call, 'GET', KEYS[2]) == ARGV[2]
if (value == 'claimed' or value == 'done') and not again then
  return NOT_CLAIMED
end
redis.call('SET', KEYS[1], 'claimed', 'PX', ARGV[1])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[1])
return (again or kind == 'none') and CLAIMED or OVERWRITTEN
