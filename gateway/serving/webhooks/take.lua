-- Take notices of a tenant that are due, for as long as a lease.
--
-- KEYS  tenants, the tenant's notices
-- ARGV  tenant, lease_ms, how many
-- reply the notices
--
-- The tenant is due again with its first notice, behind the tenants that are due now. One without notices goes.
local now = milliseconds()
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[3])
for _, notice in ipairs(due) do
  redis.call('ZADD', KEYS[2], now + ARGV[2], notice)
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
if first[2] then
  redis.call('ZADD', KEYS[1], math.max(tonumber(first[2]), now), ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return due
