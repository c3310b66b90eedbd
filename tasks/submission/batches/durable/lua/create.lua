-- Begin a batch, which stands in its tenant's list after all that stand there. Replies with 0 if there is one of this
-- name.
-- KEYS record, of tenant, open   ARGV id, now, keep_s, field, value ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
for place = 4, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[place], ARGV[place + 1])
end
redis.call('EXPIRE', KEYS[1], ARGV[3])
local last = redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
local at = math.max(tonumber(ARGV[2]), last and tonumber(last) + 0.001 or 0)
redis.call('ZADD', KEYS[2], string.format('%.3f', at), ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[3], ARGV[1])
return 1
