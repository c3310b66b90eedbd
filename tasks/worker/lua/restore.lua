-- Return messages to their queues: those of one owner, or of every owner whose lease has expired.
--
-- KEYS  owners
-- ARGV  prefix of lease keys, prefix of unacked keys, most messages to return, owner (empty: all without a lease),
--       1 to delete the owner when it has no messages left, then tags (none: all of the owner's)
-- reply {number of returned messages, damaged keys, entries that are no messages: a key, a tag and the entry each}
--
-- Damage holds up no other message: one whose queue is no list stays with its owner, until the queue is a list. An
-- entry that is none is removed, for the caller to put aside. A hash that is none is left to whoever wrote it.
--
-- The newest message is pushed first, so that the oldest is taken next. The envelope is marked as redelivered by a
-- string edit, because cjson would turn empty lists into empty objects.
local prefix, held, most, owner, forget = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local restored, damaged, strange = 0, {}, {}
local before_first = '"delivery_info"%s*:%s*{()%s*"'

-- Whether the command was refused because the key has another type than it expects.
local function wrong_type(answer)
  if type(answer) ~= 'table' or not answer.err then
    return false
  elseif not string.find(answer.err, 'WRONGTYPE') then
    error(answer.err, 0)
  end
  return true
end

-- The queue and the message of an entry, or nil.
local function parsed(entry)
  local length, start = string.match(entry, '^(%d+):()')
  local ends = length and start + tonumber(length)
  if length and ends > start and ends <= #entry + 1 then
    return string.sub(entry, start, ends - 1), string.sub(entry, ends)
  end
end

local function number(tag)
  return tonumber(tag) or 0
end

-- Whether no message is left.
local function give_back(unacked, tags)
  local whole = true
  table.sort(tags, function(a, b) return number(a) > number(b) end)
  for _, tag in ipairs(tags) do
    if restored >= most then
      return false
    end
    local entry = redis.call('HGET', unacked, tag)
    local queue, item = parsed(entry or '')
    if entry and not queue then
      strange[#strange + 1], strange[#strange + 2], strange[#strange + 3] = unacked, tag, entry
      redis.call('HDEL', unacked, tag)
      restored = restored + 1
    elseif entry then
      local at = string.match(item, before_first)
      if at and not string.find(item, '"redelivered": true', at, true) then
        item = string.sub(item, 1, at - 1) .. '"redelivered": true, ' .. string.sub(item, at)
      end
      if wrong_type(redis.pcall('RPUSH', queue, item)) then
        damaged[#damaged + 1] = queue
        whole = false
      else
        redis.call('HDEL', unacked, tag)
        restored = restored + 1
      end
    end
  end
  return whole
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
    local kind = redis.call('TYPE', unacked).ok
    if kind ~= 'hash' then
      tags = {}
      if kind ~= 'none' then
        damaged[#damaged + 1] = unacked
      end
    elseif #ARGV < 6 then
      tags = redis.call('HKEYS', unacked)
    end
    if give_back(unacked, tags) and forget == '1' then
      redis.call('SREM', KEYS[1], name)
      redis.call('DEL', prefix .. name)
    end
  end
end
return {restored, damaged, strange}
