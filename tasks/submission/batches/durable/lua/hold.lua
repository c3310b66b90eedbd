-- Renew a lease, and write fields of the record. Replies with the status; nothing: the lease is lost.
-- KEYS lease, record   ARGV token, ttl_ms, field, value ...
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return false
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for place = 3, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1])
end
return redis.call('HGET', KEYS[2], 'status')
