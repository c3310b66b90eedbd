-- Write fields of a record that is there.
-- KEYS record   ARGV field, value ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], unpack(ARGV))
end
