-- Renew a lease, unless a sweep has given its owner's messages back. A lease that expired before any sweep is
-- created again.
--
-- KEYS  owners, lease
-- ARGV  owner, ttl_ms
-- reply 1, or 0 if the owner has lost its messages
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if redis.call('PEXPIRE', KEYS[2], ARGV[2]) == 0 then
  redis.call('SET', KEYS[2], 1, 'PX', ARGV[2])
end
return 1
