-- Give a batch another status, if it has one of these. Replies with the status that it has then; nothing: it is not
-- there, or the lease is lost.
-- KEYS lease, record, open
-- ARGV token ('': anybody), id, from, to, open statuses, keep_s, field, value ...
if ARGV[1] ~= '' and redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return false
end
local status = redis.call('HGET', KEYS[2], 'status')
if not status or not string.find(ARGV[3], ',' .. status .. ',', 1, true) then
  return status
end
local now = redis.call('TIME')[1]
redis.call('HSET', KEYS[2], 'status', ARGV[4], ARGV[4] .. '_at', now)
for place = 7, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1])
end
if string.find(ARGV[5], ',' .. ARGV[4] .. ',', 1, true) then
  redis.call('SADD', KEYS[3], ARGV[2])
else
  redis.call('SREM', KEYS[3], ARGV[2])
  redis.call('DEL', KEYS[1])
end
redis.call('EXPIRE', KEYS[2], ARGV[6])
return ARGV[4]
