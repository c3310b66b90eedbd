-- Take the one request that was left by its client, if it is the only one of these.
--
-- KEYS  hash: by a request's id, `gone` or `taken`
-- ARGV  ids of requests that have not ended
-- reply its id, or '' if there is none, or more than one
local only = ''
for _, name in ipairs(ARGV) do
  if redis.call('HGET', KEYS[1], name) == 'gone' then
    if only ~= '' then
      return ''
    end
    only = name
  end
end
if only ~= '' then
  redis.call('HSET', KEYS[1], only, 'taken')
end
return only
