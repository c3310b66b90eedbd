-- Let a file stand in its tenant's list, after all that stand there: who counts those before it counts no file that
-- was made later.
-- KEYS list   ARGV now, name, ttl_s
local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
local at = math.max(tonumber(ARGV[1]), last and tonumber(last) + 0.001 or 0)
redis.call('ZADD', KEYS[1], 'NX', string.format('%.3f', at), ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
