-- Take the watched responses that are due, and name the tenants with notices that are.
--
-- KEYS  watched, tenants
-- ARGV  how many of each
-- reply {responses, tenants}
--
-- A response whose task has ended (0) is due again after a lease, in case this gateway dies. Others, of which only
-- time says that they are due, wait for their next look.
local now = milliseconds()
local watched = {}
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
for i = 1, #found, 2 do
  watched[#watched + 1] = found[i]
  redis.call('ZADD', KEYS[1], now + (tonumber(found[i + 1]) == 0 and LEASE_MS or LOOK_MS), found[i])
end
return {watched, redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[1])}
