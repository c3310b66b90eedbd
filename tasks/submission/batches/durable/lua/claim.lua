-- Claim an open batch that nobody has. Replies with its generation, or nothing.
-- KEYS lease, record, open   ARGV token, ttl_ms, id, open statuses
local status = redis.call('HGET', KEYS[2], 'status')
if not status or not string.find(ARGV[4], ',' .. status .. ',', 1, true) then
  redis.call('SREM', KEYS[3], ARGV[3])
  return false
end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return false
end
return redis.call('HINCRBY', KEYS[2], 'generation', 1)
