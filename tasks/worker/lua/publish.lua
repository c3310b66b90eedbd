-- One flush of many streams: for each task check who owns it, append to the log, publish.
--
-- KEYS  two a task: log, state
-- ARGV  ttl_ms; three a task: attempt, the log's length after this, payload (empty: no delta);
--       then three for each task that does more: its position, what it does, `done` or the adapter
-- reply only what is not as expected, four numbers a task: position, code, length of the log, where it ends
--
-- Ownership and position are both checked by commands that are needed anyway: the state is read for its owner,
-- and RPUSH answers with the log's new length. Where that is another than expected the delta is taken back: a
-- call repeated because its reply was lost changes nothing.
--
-- does  admitted  the attempt now runs             last  it was the last delta: `done` follows
--       released  the attempt no longer runs       look  refresh the TTLs, look for the cancel flag
--       read      and, when looking, for a reader    adapter  what made the first entry: its name follows
-- codes 1 stale: a newer attempt owns the task     2 the log does not end where it should
--       3 the cancel flag is set                   4 nobody reads the stream any more
local call, find = redis.call, string.find

-- The state does not name us. Whoever is older has lost the task to us, or Redis has lost our beginning.
local function stale(state, owner, mine, ttl)
  if owner and (tonumber(owner) > tonumber(mine) or call('HEXISTS', state, 'done') == 1) then
    return true
  end
  call('HSET', state, 'attempt', mine)
  call('PEXPIRE', state, ttl)
  return false
end

local function length_and_end(log)
  local entry = call('LINDEX', log, -1)
  if not entry then
    return 0, 0
  end
  local delta = cjson.decode(entry)
  return call('LLEN', log), delta.index + #delta.token_ids
end

local ttl, first_turn = ARGV[1], 2 + #KEYS / 2 * 3
local reply, turns = {}, {}
for a = first_turn, #ARGV, 3 do
  turns[tonumber(ARGV[a])] = a
end
for k = 1, #KEYS, 2 do
  local log, state, a = KEYS[k], KEYS[k + 1], (k + 1) / 2 * 3 - 1
  local mine, payload, turn = ARGV[a], ARGV[a + 2], turns[(k - 1) / 2]
  local does = turn and ARGV[turn + 1] or ''
  local code, length, ends = 0, 0, 0
  local owner = call('HGET', state, 'attempt')
  if owner ~= mine and stale(state, owner, mine, ttl) then
    code = 1
  elseif payload ~= '' then
    if call('RPUSH', log, payload) == tonumber(ARGV[a + 1]) then
      call('PUBLISH', string.sub(log, 1, -4) .. 'ch', payload)
    else
      call('RPOP', log)
      length, ends = length_and_end(log)
      if not (find(does, 'last') and call('HEXISTS', state, 'done') == 1) then  -- not our own end, said again
        code = 2
      end
    end
  end
  if code == 0 and turn then
    if find(does, 'admitted') then
      call('HSET', state, 'running', 1)
    end
    if find(does, 'adapter') then
      call('HSET', state, 'adapter', ARGV[turn + 2])
    end
    if find(does, 'last') then
      call('HSET', state, 'done', ARGV[turn + 2])
      call('HDEL', state, 'running')
    elseif find(does, 'released') then
      call('HDEL', state, 'running')
    end
    if find(does, 'look') then
      call('PEXPIRE', log, ttl)
      call('PEXPIRE', state, ttl)
      if not find(does, 'last') then
        if find(does, 'read') and call('EXISTS', string.sub(log, 1, -4) .. 'interest') == 0 then
          code = 4
        end
        if call('HEXISTS', state, 'cancel') == 1 then
          code = 3
        end
      end
    end
  end
  if code > 0 then
    for _, number in ipairs({(k - 1) / 2, code, length, ends}) do
      reply[#reply + 1] = number
    end
  end
end
return reply
