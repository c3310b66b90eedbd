-- Take messages from queues and make them this owner's, in one step: there is no instant at which a message is
-- neither in its queue nor in its owner's hash. Every write that a full Redis refuses comes before the pop.
--
-- KEYS  owners, lease, unacked, then the queues in the order in which they are served
-- ARGV  owner, ttl_ms, 1 to register a new owner, first tag, how many at most
-- reply {0} when the owner has lost its lease and what it held, else {1, tag, queue position, item, ...}
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
