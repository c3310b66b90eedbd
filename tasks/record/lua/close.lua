-- End the stream of a task whose message is not a valid request.
--
-- KEYS  log, state, asked; the seven keys that `enter` takes, if there is an entry for the ledger
-- ARGV  ttl_ms, channel, the payload in three parts (attempt and index go between them), done; the entry
-- reply the attempt, or 0 if the task is done already and nothing was written
--
-- The caller has no attempt, so the script increments it.
local ttl, channel, head, middle, tail, done = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local log, state = KEYS[1], KEYS[2]
if redis.call('HEXISTS', state, 'done') == 1 then
  return 0
end
local attempt, _, ends = redis.call('HINCRBY', state, 'attempt', 1), length_and_end(log)
local index = ends == UNKNOWN and 0 or ends
local payload = head .. attempt .. middle .. index .. tail
redis.call('RPUSH', log, payload)
if ARGV[7] then
  pcall(enter, KEYS, 4, state, ARGV[7])
end
redis.call('HSET', state, 'done', done)
redis.call('HDEL', state, 'running')
redis.call('PEXPIRE', log, ttl)
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
redis.call('PUBLISH', channel, payload)
return attempt
