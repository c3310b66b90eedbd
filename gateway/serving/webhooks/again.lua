-- Try a notice again later, if it still waits.
--
-- KEYS  tenants, the tenant's notices
-- ARGV  tenant, notice, ms until then
local at = milliseconds() + ARGV[3]
if redis.call('ZADD', KEYS[2], 'XX', 'CH', at, ARGV[2]) == 1 then
  redis.call('ZADD', KEYS[1], 'LT', at, ARGV[1])
end
return 0
