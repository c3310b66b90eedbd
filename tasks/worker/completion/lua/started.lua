-- Store the state STARTED, unless a final state is stored, and publish it.
--
-- KEYS  the result
-- ARGV  TTL in seconds (0: none), the state as Celery stores it, then the final states
-- reply 1 if it was stored, else 0
--
-- A value of another serializer may be a final state, so it is kept.
local stored = redis.call('GET', KEYS[1])
if stored then
  local read, meta = pcall(cjson.decode, stored)
  if not read or type(meta) ~= 'table' then
    return 0
  end
  for i = 3, #ARGV do
    if meta.status == ARGV[i] then
      return 0
    end
  end
end
if ARGV[1] == '0' then
  redis.call('SET', KEYS[1], ARGV[2])
else
  redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[1])
end
redis.call('PUBLISH', KEYS[1], ARGV[2])
return 1
