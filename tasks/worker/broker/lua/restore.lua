-- Return messages to their queues: those of one owner, or, in a sweep, of every owner that is dead.
--
-- KEYS  owners
-- ARGV  prefix of lease keys, prefix of unacked keys, maximum number of messages to return, owner (empty: a sweep), 1
--       to delete the owner when it has no messages left; then, for one owner: tags (none: all of the owner's); for a
--       sweep: prefix of presence channels, ms without a sign of life after which an owner may be dead, owners that
--       seem absent
-- reply {number of returned messages, damaged keys, entries that are not messages (a key, a tag and the entry each);
--       for a sweep also: owners that are alive, owners that were dead and are deleted}
--
-- An owner is dead if its lease has expired; or if it seems absent to the caller, nobody subscribes to its channel, and
-- its lease says that its last sign of life was too long ago (see `liveness`).
--
-- A damaged key affects no other message. If the queue of a message is not a list, the message stays with its owner
-- until the queue is a list. An entry that is not a message is removed, and the caller puts it aside. A key that should
-- be a hash and is not is left alone.
--
-- Only this script knows a sweep's owners and the queues of their messages, so it makes the owners' keys from prefixes.
--
-- The newest message is pushed first, so that the oldest is taken next. The envelope is marked as redelivered, as
-- kombu does, by a string edit, because cjson would turn empty lists into empty objects. The mark is only a hint for
-- tasks, because a message may be written so that the edit fails. No death depends on the mark.
local prefix, held, most, owner, forget = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local restored, damaged, strange = 0, {}, {}
local before_first = '^.*"delivery_info"%s*:%s*{()%s*"' -- the last object of this name: headers precede properties

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
      if not unless_damaged(redis.call, 'RPUSH', queue, item) then
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

local swept, alive, deleted = owner == '', {}, {}
local LEASES_A_CALL = 1000

local function is_absent(name, sign_of_life)
  local at = tonumber(sign_of_life)
  if not at or milliseconds() - at <= tonumber(ARGV[7]) then
    return false
  end
  return redis.call('PUBSUB', 'NUMSUB', ARGV[6] .. name)[2] == 0
end

-- The dead owners. Also notes the owners that are alive.
local function dead_owners()
  local names, seems_absent, dead = redis.call('SMEMBERS', KEYS[1]), {}, {}
  for position = 8, #ARGV do
    seems_absent[ARGV[position]] = true
  end
  for first = 1, #names, LEASES_A_CALL do
    local leases = {}
    for i = first, math.min(first + LEASES_A_CALL - 1, #names) do
      leases[#leases + 1] = prefix .. names[i]
    end
    for i, value in ipairs(redis.call('MGET', unpack(leases))) do
      local name = names[first + i - 1]
      if not value and redis.call('EXISTS', leases[i]) == 0 or seems_absent[name] and is_absent(name, value) then
        dead[#dead + 1] = name
      else
        alive[#alive + 1] = name
      end
    end
  end
  return dead
end

local owners = swept and dead_owners() or {owner}
for _, name in ipairs(owners) do
  local unacked = held .. name
  local tags = {}
  for position = swept and #ARGV + 1 or 6, #ARGV do
    tags[#tags + 1] = ARGV[position]
  end
  local all = #tags == 0
  local kind = redis.call('TYPE', unacked).ok
  if kind ~= 'hash' then
    tags = {}
    if kind ~= 'none' then
      damaged[#damaged + 1] = unacked
    end
  elseif all then
    tags = redis.call('HKEYS', unacked)
  end
  if give_back(unacked, tags) and forget == '1' then
    redis.call('SREM', KEYS[1], name)
    redis.call('DEL', prefix .. name)
    deleted[#deleted + 1] = name
  end
end
return {restored, damaged, strange, alive, deleted}
