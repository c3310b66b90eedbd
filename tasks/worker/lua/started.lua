-- Store the state STARTED, unless there is an end, and tell who waits for the task.
--
-- KEYS  the result
-- ARGV  seconds until it expires (0: never), the state as Celery stores it, then the states that are an end
--
-- What another serializer has written may be an end: it stays.
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
