-- Claim an open batch that nobody has. Replies with its generation, or nothing. A runner before this one that has not
-- said how it ended has died: `deaths` counts those since rows, or the list of rows that are set aside, have changed.
-- KEYS lease, record, open   ARGV token, ttl_ms, id, open statuses
local function fact(name)
  return redis.call('HGET', KEYS[2], name) or ''
end
local status = fact('status')
if status == '' or not string.find(ARGV[4], ',' .. status .. ',', 1, true) then
  redis.call('SREM', KEYS[3], ARGV[3])
  return false
end
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return false
end
local reached = table.concat({status, tonumber(fact('ended')) or 0, fact('aside')}, ' ')
local deaths = 0
if fact('running') == '1' then
  deaths = 1 + (fact('reached') == reached and tonumber(fact('deaths')) or 0)
end
redis.call('HSET', KEYS[2], 'running', '1', 'reached', reached, 'deaths', deaths)
return redis.call('HINCRBY', KEYS[2], 'generation', 1)
