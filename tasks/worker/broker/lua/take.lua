-- Move messages from queues to this owner's hash, atomically: a message is always in its queue or in a hash. Every
-- write that a full Redis may refuse precedes the pop.
--
-- KEYS  owners, lease, unacked, then the queues in the order in which they are served
-- ARGV  owner, ttl_ms, 1 to register a new owner, first tag, maximum number of messages to take, then for affinity: how
--       many ms a message is left to its home (0: there are no homes), the maximum number of messages of an owner,
--       prefixes of lease keys, of unacked keys and of home keys
-- reply {LOST} if the owner has lost its lease and its messages; {DAMAGED} if its hash is not a hash; else {TAKEN,
--       number of messages left to others, then for each message taken: tag, queue position, item; for a queue that
--       is not a list: 0, its position, ''}
--
-- Only this script knows the homes of messages and the owners that they name, so it makes their keys from prefixes.
--
-- Affinity is delay scheduling (Zaharia et al., EuroSys 2010) with bounded loads. The owner that took the last message
-- with an affinity is the home of that affinity. It gets the next message if it lives, has room, and takes the message
-- soon. A home key holds the time since which others wait for the home (0: nobody waits), a space, and the owner.
local owner, ttl, new, tag, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local most_wait, limit, leases, held, homes = tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10]
local HOME_MS, LOOK_AHEAD, HEADER = 600000, 64, '"' .. AFFINITY_HEADER .. '"'
local left, now = 0, nil

local function this_moment()
  now = now or milliseconds()
  return now
end

local function held_by(unacked)
  return unless_damaged(redis.call, 'HLEN', unacked) or 0
end

local function home_of(queue, item)
  local at = most_wait > 0 and string.find(item, HEADER, 1, true)
  local affinity = at and string.match(item, '^%s*:%s*"([%w_-]+)"', at + #HEADER)
  if not affinity or #affinity > ID_BYTES then
    return nil
  end
  return homes .. string.match(queue, '^[^\6]*') .. ':' .. affinity -- one home for all priorities of a queue
end

local function is_left_to(home)
  local since, other = string.match(unless_damaged(redis.call, 'GET', home) or '', '^(%d+) (.+)$')
  if not other or other == owner or redis.call('EXISTS', leases .. other) == 0 then
    return false
  end
  local theirs, mine = held_by(held .. other), held_by(KEYS[3])
  if theirs >= limit or theirs > 2 * mine + limit / 4 then
    return false
  end
  if since == '0' then
    redis.call('SET', home, this_moment() .. ' ' .. other, 'KEEPTTL')
    return true
  end
  return this_moment() - tonumber(since) < most_wait
end

if new == '1' then
  redis.call('SET', KEYS[2], this_moment(), 'PX', ttl)
  redis.call('SADD', KEYS[1], owner)
elseif redis.call('SISMEMBER', KEYS[1], owner) == 0 then
  return {LOST}
end
local taken = {TAKEN, 0}
for position = 4, #KEYS do
  local queue, index = KEYS[position], -1
  while most > 0 and left < LOOK_AHEAD do
    local item = unless_damaged(redis.call, 'LINDEX', queue, index)
    if not item then
      if item == nil then
        taken[#taken + 1], taken[#taken + 2], taken[#taken + 3] = 0, position - 4, ''
      end
      break
    end
    local home = home_of(queue, item)
    if home and is_left_to(home) then
      left = left + 1
      index = index - 1
    else
      if not unless_damaged(redis.call, 'HSET', KEYS[3], tag, #queue .. ':' .. queue .. item) then
        return {DAMAGED}
      end
      if home then
        redis.call('SET', home, '0 ' .. owner, 'PX', HOME_MS)
      end
      if index == -1 then
        redis.call('RPOP', queue)
      else
        redis.call('LREM', queue, -1, item)
      end
      taken[#taken + 1] = tag
      taken[#taken + 1] = position - 4
      taken[#taken + 1] = item
      tag = tag + 1
      most = most - 1
    end
  end
end
taken[2] = left
return taken
