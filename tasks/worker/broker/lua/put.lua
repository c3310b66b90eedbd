-- Put a message into a queue, unless it was put before.
--
-- KEYS  queue, the set of messages that were put
-- ARGV  the message's name in the set, the set's TTL in seconds, the message
-- reply 1 if the message was put now, else 0
if unless_damaged(redis.call, 'SISMEMBER', KEYS[2], ARGV[1]) == 1 then
  return 0
end
redis.call('LPUSH', KEYS[1], ARGV[3])
if unless_damaged(redis.call, 'SADD', KEYS[2], ARGV[1]) then
  redis.call('EXPIRE', KEYS[2], ARGV[2])
end
return 1
