-- Move messages from queues to this owner's hash, atomically: a message is always in its queue or in a hash. Every
-- write that a full Redis may refuse precedes the pop.
--
-- KEYS  owners, lease, unacked, then the queues in the order in which they are served
-- ARGV  owner, ttl_ms, 1 to register a new owner, first tag, most messages to take
-- reply {0} if the owner has lost its lease and its messages, else {1, tag, queue position, item, ...}
local owner, ttl, new, tag, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if new == '1' then
  redis.call('SET', KEYS[2], 1, 'PX', ttl)
  redis.call('SADD', KEYS[1], owner)
elseif redis.call('SISMEMBER', KEYS[1], owner) == 0 then
  return {0}
end
local taken = {1}
for position = 4, #KEYS do
  local queue = KEYS[position]
  while most > 0 do
    local item = redis.call('LINDEX', queue, -1)
    if not item then
      break
    end
    redis.call('HSET', KEYS[3], tag, #queue .. ':' .. queue .. item)
    redis.call('RPOP', queue)
    taken[#taken + 1] = tag
    taken[#taken + 1] = position - 4
    taken[#taken + 1] = item
    tag = tag + 1
    most = most - 1
  end
end
return taken
