-- Stands before every script: functions for damaged keys, into which somebody else has written.
--
-- A key is damaged if it has another type than a command expects, or does not hold a number where one is expected. A
-- script goes on with all other keys, and names the damaged key in its reply. A script with only one key fails with an
-- error that `tasks.servers.answers` recognises. Errors of the server, such as a full one, always end the script.

local function is_damage(problem)
  local message = type(problem) == 'table' and problem.err or problem
  return string.find(message, 'WRONGTYPE') or string.find(message, 'not an integer')
    or string.find(message, 'would overflow')
end

-- The results of `work`, up to three values, or nil if it meets a damaged key.
local function unless_damaged(work, ...)
  local done, first, second, third = pcall(work, ...)
  if done then
    return first, second, third
  elseif not is_damage(first) then
    error(first, 0)
  end
end

local function whole(text)
  return tonumber(text) or error('not an integer')
end

-- This server's time.
local function milliseconds()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The length of a log, and the index at which its next delta begins: -1 behind an entry that is nobody's delta.
local function length_and_end(log)
  local entry = redis.call('LINDEX', log, -1)
  if not entry then
    return 0, 0
  end
  local read, ends = pcall(function()
    local delta = cjson.decode(entry)
    return delta.index + #delta.token_ids
  end)
  return redis.call('LLEN', log), read and ends or -1
end
