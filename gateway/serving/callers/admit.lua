-- Admit a request of a caller, or say which limit it meets. Nothing is counted unless every limit has room.
--
-- KEYS  for the tenant and then for its key: what was used, what runs
-- ARGV  give_up_s; tokens in, tokens out (held until the end, and no more than a limit); for the tenant and then for the key: its requests,
--       tokens in, tokens out in a minute, tasks at a time (-1: no limit); how many tasks the request has; their
--       ids; then commands, each behind the number of its words: what is written of a request that is admitted. If
--       the number is negative, the number of the slot stands between the last two words
-- reply {wait_ms, what}, 0 if it is admitted; the number of the slot; then for each of the two and of requests,
--       input, output: limit, left, ms until all of it is left again
--
-- What was used is counted in slots of SLOT_MS. A limit is kept for every minute, wherever it begins: the sum of the
-- slots that a minute touches is never above. What a task uses is known at its end; `enter` corrects it.
local call, now, give_up_s = redis.call, milliseconds(), tonumber(ARGV[1])
local names, asked = {'requests:', 'input:', 'output:'}, {1, tonumber(ARGV[2]), tonumber(ARGV[3])}
local slot, oldest = math.floor(now / SLOT_MS), math.floor((now - 60000) / SLOT_MS)
local tasks, wait_ms, what, report = tonumber(ARGV[12]), 0, '', {}
local limits, here = {{}, {}}, {{0, 0, 0}, {0, 0, 0}}
for who = 1, 2 do
  for place = 1, 4 do
    limits[who][place] = tonumber(ARGV[4 * who + place - 1])
  end
end

-- Which kind a field counts, and in which slot; nil if that is over a minute ago. The tenant and the key have the
-- same fields.
local PLACES, kinds, slots = {r = 1, i = 2, o = 3}, {}, {}
local function place_of(field)
  if kinds[field] == nil then
    local place = PLACES[string.sub(field, 1, 1)]
    local of = place and tonumber(string.sub(field, #names[place] + 1))
    kinds[field], slots[field] = of and of >= oldest and place or false, of
  end
  return kinds[field], slots[field]
end

local function ends_in(of)
  return (of + 1) * SLOT_MS + 60000 - now
end

-- What of each kind was used in each slot, and the last slot with any. Older slots are forgotten.
local function used_in(key)
  local used, last, old, stored = {{}, {}, {}}, {oldest, oldest, oldest}, {}, call('HGETALL', key)
  for i = 1, #stored, 2 do
    local place, of = place_of(stored[i])
    if place then
      used[place][of] = tonumber(stored[i + 1])
      last[place] = math.max(last[place], of)
    else
      old[#old + 1] = stored[i]
    end
  end
  for _, field in ipairs(old) do
    call('HDEL', key, field)
  end
  return used, last
end

local function counts_minutes(who)
  return math.max(unpack(limits[who], 1, 3)) >= 0
end

for who = 1, 2 do
  local used, last
  if counts_minutes(who) then
    used, last = used_in(KEYS[2 * who - 1])
  end
  for place = 1, 3 do
    local limit, left, full_ms = limits[who][place], -1, 0
    if limit >= 0 then
      left = limit
      for of, number in pairs(used[place]) do
        left, full_ms = left - number, ends_in(last[place])
      end
      here[who][place] = used[place][slot] or 0
      local lacks = asked[place] - left
      if lacks > 0 then
        local until_ms = 60000
        for of = oldest, last[place] do
          lacks = lacks - (used[place][of] or 0)
          if lacks <= 0 then
            until_ms = ends_in(of)
            break
          end
        end
        if until_ms > wait_ms then
          wait_ms, what = until_ms, string.sub(names[place], 1, -2)
        end
      end
    end
    report[#report + 1], report[#report + 2], report[#report + 3] = limit, left, full_ms
  end
  local most, running = limits[who][4], KEYS[2 * who]
  if most >= 0 and call('ZCARD', running) + tasks > most then
    call('ZREMRANGEBYSCORE', running, '-inf', now)
    if call('ZCARD', running) + tasks > most and wait_ms < 1000 then
      wait_ms, what = 1000, 'concurrent'
    end
  end
end

-- A gateway that has lost its connection asks again: where tasks are counted, this request's may be among them.
local counted = limits[1][4] >= 0 and KEYS[2] or limits[2][4] >= 0 and KEYS[4]
local again = tasks > 0 and counted and call('ZSCORE', counted, ARGV[13])
if again then
  wait_ms, what = 0, ''
end

-- What was counted lives for longer than it matters. Once a slot is enough to see to that.
local function count(who)
  local used, running, fields, members = KEYS[2 * who - 1], KEYS[2 * who], {}, {}
  local is_first = not counts_minutes(who)
  for place = 1, 3 do
    if limits[who][place] >= 0 then
      fields[#fields + 1], fields[#fields + 2] = names[place] .. slot, here[who][place] + asked[place]
      is_first = is_first or here[who][place] == 0
    end
  end
  if #fields > 0 then
    call('HSET', used, unpack(fields))
    if is_first then
      call('EXPIRE', used, 120)
    end
  end
  if limits[who][4] >= 0 and tasks > 0 then
    for a = 13, 12 + tasks do
      members[#members + 1], members[#members + 2] = now + 1000 * give_up_s, ARGV[a]
    end
    call('ZADD', running, unpack(members))
    if is_first then
      call('EXPIRE', running, give_up_s + 60)
    end
  end
end

if wait_ms == 0 then
  for who = again and 3 or 1, 2 do
    count(who)
  end
  local at = 13 + tasks
  while ARGV[at] do
    local words = math.abs(tonumber(ARGV[at]))
    local command = {unpack(ARGV, at + 1, at + words)}
    if ARGV[at] ~= tostring(words) then
      command[words - 1], command[words] = command[words - 1] .. slot .. command[words], nil
    end
    call(unpack(command))
    at = at + 1 + words
  end
end
return {wait_ms, what, slot, unpack(report)}
