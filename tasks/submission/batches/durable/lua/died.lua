-- Note why a runner has died, and the row that it handled, which is set aside when that many have died of it.
-- KEYS record   ARGV why, field of the row ('': none), deaths
if redis.call('EXISTS', KEYS[1]) == 0 then
  return
end
redis.call('HSET', KEYS[1], 'note', ARGV[1])
if ARGV[2] ~= '' and redis.call('HINCRBY', KEYS[1], ARGV[2], 1) == tonumber(ARGV[3]) then
  redis.call('HINCRBY', KEYS[1], 'aside', 1)
end
