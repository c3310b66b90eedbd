-- Admit a request of a caller, or say which limit it meets. Nothing is counted unless every limit has room.
--
-- KEYS  for the tenant and then for its key: what was used, what runs
-- ARGV  give_up_s; tokens in, tokens out (held until the end, and no more than a limit); for the tenant and then for the key: its requests,
--       tokens in, tokens out in a minute, tasks at a time (-1: no limit); how many tasks the request has; their
--       ids; then commands, each behind the number of its words: what is written of a request that is admitted. The
--       first writes its record: `SET RECORD ...`. If the number of words is negative, the number of the slot stands
--       between the last two
-- reply {wait_ms, what}, 0 if it is admitted; the number of the slot; then for each of the two and of requests,
--       input, output: limit, left after this request, ms until all of it is left again
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

-- Which kind a field counts, and in which slot; false if that is over a minute ago. The tenant and the key have mostly
-- the same fields.
local PLACES, places, slots = {r = 1, i = 2, o = 3}, {}, {}
local sub, tonumber = string.sub, tonumber
local function place_of(field)
  local place = PLACES[sub(field, 1, 1)]
  local of = place and tonumber(sub(field, #names[place] + 1))
  places[field], slots[field] = of and of >= oldest and place or false, of
  return places[field]
end

local function ends_in(of)
  return (of + 1) * SLOT_MS + 60000 - now
end

-- What of each kind was used, the last slot with any (0: none), and the fields and values themselves. `here`: takes what
-- was used in this slot. Older slots are forgotten.
local function used_in(key, here)
  local used, last, stored = {0, 0, 0}, {0, 0, 0}, call('HGETALL', key)
  for i = 1, #stored, 2 do
    local field = stored[i]
    local place = places[field]
    if place == nil then
      place = place_of(field)
    end
    if place then
      local number, of = tonumber(stored[i + 1]) or 0, slots[field]
      used[place] = used[place] + number
      if of > last[place] then
        last[place] = of
      end
      if of == slot then
        here[place] = number
      end
    else
      call('HDEL', key, field)
    end
  end
  return used, last, stored
end

-- In how many ms so much of a kind is left again.
local function wait_for(lacks, place, last, stored)
  local used = {}
  for i = 1, #stored, 2 do
    if places[stored[i]] == place then
      used[slots[stored[i]]] = tonumber(stored[i + 1])
    end
  end
  for of = oldest, last do
    lacks = lacks - (used[of] or 0)
    if lacks <= 0 then
      return ends_in(of)
    end
  end
  return 60000
end

local function counts_minutes(who)
  return math.max(unpack(limits[who], 1, 3)) >= 0
end

for who = 1, 2 do
  local used, last, stored
  if counts_minutes(who) then
    used, last, stored = used_in(KEYS[2 * who - 1], here[who])
  end
  for place = 1, 3 do
    local limit, left, full_ms = limits[who][place], -1, 0
    if limit >= 0 then
      left = limit - used[place]
      full_ms = last[place] > 0 and ends_in(last[place]) or 0
      local lacks = asked[place] - left
      if lacks > 0 then
        local until_ms = wait_for(lacks, place, last[place], stored)
        if until_ms > wait_ms then
          wait_ms, what = until_ms, sub(names[place], 1, -2)
        end
      end
    end
    local at = 9 * who + 3 * place - 12
    report[at + 1], report[at + 2], report[at + 3] = limit, left, full_ms
  end
  local most, running = limits[who][4], KEYS[2 * who]
  if most >= 0 and call('ZCARD', running) + tasks > most then
    call('ZREMRANGEBYSCORE', running, '-inf', now)
    if call('ZCARD', running) + tasks > most and wait_ms < 1000 then
      wait_ms, what = 1000, 'concurrent'
    end
  end
end

-- A gateway that has lost its connection asks again. If the request was admitted then, its record is there.
local first = 13 + tasks
local again = ARGV[first + 1] == 'SET' and call('EXISTS', ARGV[first + 2]) == 1
if again then
  wait_ms, what = 0, ''
end

-- Counts this request, also in the report. What was counted lives for longer than it matters. Once a slot is enough to see
-- to that.
local function count(who)
  local used, running, fields, members = KEYS[2 * who - 1], KEYS[2 * who], {}, {}
  local is_first = not counts_minutes(who)
  for place = 1, 3 do
    if limits[who][place] >= 0 then
      local at = 9 * who + 3 * place - 12
      report[at + 2] = report[at + 2] - asked[place]
      if asked[place] > 0 then
        report[at + 3] = ends_in(slot)
      end
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
  local at = first
  while ARGV[at] do
    local words = tonumber(ARGV[at])
    if words > 0 then
      call(unpack(ARGV, at + 1, at + words))
    else
      words = -words
      local command = {unpack(ARGV, at + 1, at + words - 1)}
      command[words - 1] = command[words - 1] .. slot .. ARGV[at + words]
      call(unpack(command))
    end
    at = at + 1 + words
  end
end
return {wait_ms, what, slot, unpack(report)}
