-- Renew a lease, and write fields of the record. Replies with the status; nothing: the lease is lost, or the record.
-- KEYS lease, record   ARGV token, ttl_ms, keep_s, field, value ...
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('EXISTS', KEYS[2]) == 0 then
  return false
end
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
for place = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1])
end
return redis.call('HGET', KEYS[2], 'status')
