-- End a stream that no worker runs: a task revoked or expired before it began, or a message that is no request.
--
-- KEYS  log, state
-- ARGV  ttl_ms, payload up to and after the attempt, and up to and after the index, done
-- The caller owns no attempt, so the next one is taken here; a task that is done is left alone.
local ttl, head, middle, tail, done = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local log, state = KEYS[1], KEYS[2]
local was = redis.call('HMGET', state, 'done', 'head')
if was[1] then
  return 0
end
local attempt = redis.call('HINCRBY', state, 'attempt', 1)
local written = was[2] and string.match(was[2], '/(%d+)') or '0'
local payload = head .. attempt .. middle .. written .. tail
redis.call('RPUSH', log, payload)
redis.call('HSET', state, 'done', done, 'head', attempt .. '/' .. written .. '/done')
redis.call('HDEL', state, 'running')
redis.call('PEXPIRE', log, ttl)
redis.call('PEXPIRE', state, ttl)
redis.call('PUBLISH', string.sub(log, 1, -4) .. 'ch', payload)
return attempt
