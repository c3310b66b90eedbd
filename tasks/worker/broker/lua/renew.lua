-- Renew a lease, unless a sweep has given its owner's messages back. A lease that expired before any sweep is
-- created again. Its value says when its owner last showed a sign of life, in ms by this server's clock.
--
-- KEYS  owners, lease, server
-- ARGV  owner; ttl_ms, or 0: only show a sign of life, for a worker whose engine hangs; the id of the server's run on
--       which the owner is present, or nothing
-- reply 1, or 0 if the owner has lost its messages
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 0 then
  return 0
end
if ARGV[2] == '0' then
  redis.call('SET', KEYS[2], milliseconds(), 'XX', 'KEEPTTL')
else
  redis.call('SET', KEYS[2], milliseconds(), 'PX', ARGV[2])
  if ARGV[3] ~= '' then
    redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[2])
  end
end
return 1
