-- Return messages to their queues: those of one owner, or of every owner whose lease has expired.
--
-- KEYS  owners
-- ARGV  prefix of lease keys, prefix of unacked keys, most messages to return, owner (empty: all without a lease),
--       1 to delete the owner when it has no messages left, then tags (none: all of the owner's)
-- reply number of returned messages
--
-- The newest message is pushed first, so that the oldest is taken next. The envelope is marked as redelivered by a
-- string edit, because cjson would turn empty lists into empty objects.
local prefix, held, most, owner, forget = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local restored = 0
local before_first = '"delivery_info"%s*:%s*{()%s*"'

local function give_back(unacked, tags)
  table.sort(tags, function(a, b) return tonumber(a) > tonumber(b) end)
  for _, tag in ipairs(tags) do
    if restored >= most then
      return false
    end
    local entry = redis.call('HGET', unacked, tag)
    if entry then
      local colon = string.find(entry, ':', 1, true)
      local length = tonumber(string.sub(entry, 1, colon - 1))
      local queue = string.sub(entry, colon + 1, colon + length)
      local item = string.sub(entry, colon + length + 1)
      local at = string.match(item, before_first)
      if at and not string.find(item, '"redelivered": true', at, true) then
        item = string.sub(item, 1, at - 1) .. '"redelivered": true, ' .. string.sub(item, at)
      end
      redis.call('RPUSH', queue, item)
      redis.call('HDEL', unacked, tag)
      restored = restored + 1
    end
  end
  return true
end

local owners = {owner}
if owner == '' then
  owners = redis.call('SMEMBERS', KEYS[1])
end
for _, name in ipairs(owners) do
  if owner ~= '' or redis.call('EXISTS', prefix .. name) == 0 then
    local unacked = held .. name
    local tags = {}
    for position = 6, #ARGV do
      tags[#tags + 1] = ARGV[position]
    end
    if #ARGV < 6 then
      tags = redis.call('HKEYS', unacked)
    end
    if give_back(unacked, tags) and forget == '1' then
      redis.call('SREM', KEYS[1], name)
      redis.call('DEL', prefix .. name)
    end
  end
end
return restored
