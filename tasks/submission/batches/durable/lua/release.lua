-- Let go of a batch, whose runner ends.
-- KEYS lease, record   ARGV token
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  if redis.call('EXISTS', KEYS[2]) == 1 then
    redis.call('HSET', KEYS[2], 'running', '')
  end
end
