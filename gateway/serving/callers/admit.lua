-- Admit a request of a caller, or say which limit it meets. Nothing is counted unless every limit has room.
--
-- KEYS  for the tenant and then for its key: what was used, what runs
-- ARGV  give_up_s; tokens in, tokens out (held until the end, and no more than a limit); for the tenant and then for the key: its requests,
--       tokens in, tokens out in a minute, tasks at a time (-1: no limit); how many tasks the request has; their
--       ids; then commands, each behind the number of its words: what is written of a request that is admitted
-- reply {wait_ms, what}, 0 if it is admitted; the number of the slot; then for each of the two and of requests,
--       input, output: limit, left, ms until all of it is left again
--
-- What was used is counted in slots of SLOT_MS. A limit is kept for every minute, wherever it begins: the sum of the
-- slots that a minute touches is never above. What a task uses is known at its end; `enter` corrects it.
local now, give_up_s = milliseconds(), tonumber(ARGV[1])
local names, asked = {'requests', 'input', 'output'}, {1, tonumber(ARGV[2]), tonumber(ARGV[3])}
local slot, oldest = math.floor(now / SLOT_MS), math.floor((now - 60000) / SLOT_MS)
local wait_ms, what, report = 0, '', {}
local tasks = tonumber(ARGV[12])
-- A gateway that has lost its connection asks again: where tasks are counted, this request's may be among them.
local again = tasks > 0 and (redis.call('ZSCORE', KEYS[2], ARGV[13]) or redis.call('ZSCORE', KEYS[4], ARGV[13]))

-- What of each kind was used in each slot. Older slots are forgotten.
local function used_in(key)
  local found, stored = {requests = {}, input = {}, output = {}}, redis.call('HGETALL', key)
  for i = 1, #stored, 2 do
    local name, of = string.match(stored[i], '^(%a+):(%d+)$')
    if of and tonumber(of) >= oldest then
      found[name][#found[name] + 1] = {tonumber(of), tonumber(stored[i + 1])}
    else
      redis.call('HDEL', key, stored[i])
    end
  end
  return found
end

local function ends_in(of)
  return (of + 1) * SLOT_MS + 60000 - now
end

for who = 1, 2 do
  local limits = {unpack(ARGV, 4 * who, 4 * who + 3)}
  local used = used_in(KEYS[2 * who - 1])
  for place, name in ipairs(names) do
    local limit, left, full_ms = tonumber(limits[place]), -1, 0
    if limit >= 0 then
      left = limit
      for _, one in ipairs(used[name]) do
        left, full_ms = left - one[2], math.max(full_ms, ends_in(one[1]))
      end
      local lacks = asked[place] - left
      if lacks > 0 then
        table.sort(used[name], function(a, b) return a[1] < b[1] end)
        local until_ms = 60000
        for _, one in ipairs(used[name]) do
          lacks = lacks - one[2]
          if lacks <= 0 then
            until_ms = ends_in(one[1])
            break
          end
        end
        if until_ms > wait_ms then
          wait_ms, what = until_ms, name
        end
      end
    end
    for _, number in ipairs({limit, left, full_ms}) do
      report[#report + 1] = number
    end
  end
  local most, running = tonumber(limits[4]), KEYS[2 * who]
  if most >= 0 then
    redis.call('ZREMRANGEBYSCORE', running, '-inf', now)
    if redis.call('ZCARD', running) + tasks > most and wait_ms < 1000 then
      wait_ms, what = 1000, 'concurrent'
    end
  end
end

if again then
  wait_ms, what = 0, ''
end
if wait_ms == 0 then
  for who = again and 3 or 1, 2 do
    local limits = {unpack(ARGV, 4 * who, 4 * who + 3)}
    for place, name in ipairs(names) do
      if tonumber(limits[place]) >= 0 then
        redis.call('HINCRBY', KEYS[2 * who - 1], name .. ':' .. slot, asked[place])
        redis.call('EXPIRE', KEYS[2 * who - 1], 120)
      end
    end
    if tonumber(limits[4]) >= 0 then
      for a = 13, 12 + tasks do
        redis.call('ZADD', KEYS[2 * who], now + 1000 * give_up_s, ARGV[a])
      end
      redis.call('EXPIRE', KEYS[2 * who], give_up_s + 60)
    end
  end
  local at = 13 + tasks
  while ARGV[at] do
    local words = tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, at + words))
    at = at + 1 + words
  end
end
return {wait_ms, what, slot, unpack(report)}
