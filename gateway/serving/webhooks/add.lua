-- Let a notice wait, due at once. One that waits already keeps its time.
--
-- KEYS  tenants, the tenant's notices; the mark of a notice that is told once, if it is one
-- ARGV  tenant, notice, how many may wait, how long they are tried for in s; how long the mark is kept in s
-- reply how many had to go: those that are tried last, because they have failed most often
--
-- The mark and the notice are written in one step, so whoever dies, there are both or neither.
local now = milliseconds()
if KEYS[3] and not redis.call('SET', KEYS[3], '1', 'NX', 'EX', ARGV[5]) then
  return 0
end
redis.call('ZADD', KEYS[2], 'NX', now, ARGV[2])
redis.call('ZADD', KEYS[1], 'LT', now, ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[4])
local beyond = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[3])
if beyond > 0 then
  redis.call('ZREMRANGEBYRANK', KEYS[2], -beyond, -1)
end
return math.max(beyond, 0)
