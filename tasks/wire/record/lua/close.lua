-- End the stream of a task whose message is not a valid request, unless the message is another's: the task has ended in
-- another way, or runs by a message with another name.
--
-- KEYS  log, state, asked, runs, messages; the seven keys that `enter` takes, if there is an entry for the ledger
-- ARGV  ttl_ms, channel, the payload in three parts (attempt and index go between them), done, the message's name ('':
--       it has none), 1 if it is surely the task's; the entry
-- reply ENDED: by this call, by an earlier one, or by an attempt at this message; ANOTHERS: nothing was written
--
-- The caller has no attempt, so the script increments it.
local ttl, channel, head, middle, tail, done, name = unpack(ARGV, 1, 7)
local log, state, runs = KEYS[1], KEYS[2], KEYS[4]
local own = ARGV[8] == '1' or redis.call('HEXISTS', state, 'message:' .. name) == 1
  or unless_damaged(redis.call, 'SISMEMBER', KEYS[5], name) == 1
local known = redis.call('HGET', state, 'done')
if known then
  return (own or known == done) and ENDED or ANOTHERS
elseif not own and (redis.call('HEXISTS', state, 'running') == 1 or whole(redis.call('GET', runs) or 0) > 0) then
  return ANOTHERS
end
local attempt, _, ends = redis.call('HINCRBY', state, 'attempt', 1), length_and_end(log)
local index = ends == UNKNOWN and 0 or ends
local payload = head .. attempt .. middle .. index .. tail
redis.call('RPUSH', log, payload)
if ARGV[9] then
  pcall(enter, KEYS, 6, state, ARGV[9])
end
redis.call('HSET', state, 'done', done)
redis.call('HDEL', state, 'running')
redis.call('PEXPIRE', log, ttl)
redis.call('PEXPIRE', state, ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
redis.call('PUBLISH', channel, payload)
return ENDED
