-- Flush many streams: for each task check its owner, append a delta to the log, and publish it.
--
-- KEYS  two per task: log, state; then of its task, for each operation `read` the interest key, for each `look` what
--       producers have asked, and for each `ledger` the seven keys that `enter` takes
-- ARGV  ttl_ms, number of tasks; four per task: attempt, expected length of the log after the append, payload (empty:
--       no delta), channel; then five for each task with operations: its position, the operations, `done` or the
--       adapter, the delta that announces a prepared task, its entry in the ledger
-- reply only for tasks with a code, four numbers each: position, code, length of the log, index of its end
--
-- The checks cost no extra command for the log: RPUSH returns its new length. If that is not the expected one, the
-- delta is removed again, so a call that is repeated after a lost reply changes nothing.
--
-- operations  admitted  set `running`        last      the delta is the last: store `done`
--             released  delete `running`     adapter   store the adapter that generated the first entry
--             look      refresh the TTLs, check the cancel flag; with last: that expires as the log does
--             ttl=MS    with look: another TTL than ttl_ms
--             read      with look: check that the stream has a reader
--             ledger    with last: enter the task in the ledger, unless it is done already
--             prepared  before the delta, while the log is empty: store and publish what is known of the task
-- codes       STALE      a newer attempt owns the task    GAP     the log has another length than expected
--             FLAGGED    the cancel flag is set           UNREAD  the stream has no reader
--             DAMAGED    the task's keys are damaged: nothing more is written; other streams are not affected
local call, find = redis.call, string.find

-- Called if the state names another owner than `mine`, or none. True if that owner is newer, or the task is done.
-- Otherwise the owner is older, or Redis has lost the state: this attempt becomes the owner.
local function stale(state, owner, mine, ttl)
  local newest = owner and whole(owner)
  if newest and (newest > tonumber(mine) or call('HEXISTS', state, 'done') == 1) then
    return true
  end
  call('HSET', state, 'attempt', mine)
  call('PEXPIRE', state, ttl)
  return false
end

local ttl, tasks = ARGV[1], tonumber(ARGV[2])
local reply, turns, interests, asked, ledgers, next_key = {}, {}, {}, {}, {}, 2 * tasks + 1
for a = 3 + 4 * tasks, #ARGV, 5 do
  local task = tonumber(ARGV[a])
  turns[task] = a
  if find(ARGV[a + 1], 'read') then
    interests[task], next_key = KEYS[next_key], next_key + 1
  end
  if find(ARGV[a + 1], 'look') then
    asked[task], next_key = KEYS[next_key], next_key + 1
  end
  if find(ARGV[a + 1], 'ledger') then
    ledgers[task], next_key = next_key, next_key + 7
  end
end

-- Write one stream. Returns its code, the length of its log, and the index of its end.
local function write(task)
  local log, state, turn, a = KEYS[2 * task + 1], KEYS[2 * task + 2], turns[task], 3 + 4 * task
  local mine, payload, channel = ARGV[a], ARGV[a + 2], ARGV[a + 3]
  local operations = turn and ARGV[turn + 1] or ''
  local code, length, ends = 0, 0, 0
  local owner = call('HGET', state, 'attempt')
  if owner ~= mine and stale(state, owner, mine, ttl) then
    code = STALE
  elseif turn and find(operations, 'prepared') and call('EXISTS', log) == 0 then
    call('HSET', state, 'prepared', ARGV[turn + 3])
    call('PEXPIRE', state, ttl)
    call('PUBLISH', channel, ARGV[turn + 3])
  end
  if code == 0 and payload ~= '' then
    if call('RPUSH', log, payload) == tonumber(ARGV[a + 1]) then
      call('PUBLISH', channel, payload)
    else
      call('RPOP', log)
      length, ends = length_and_end(log)
      if not (find(operations, 'last') and call('HEXISTS', state, 'done') == 1) then  -- else our own end, repeated
        code = GAP
      end
    end
  end
  if code == 0 and turn then
    if find(operations, 'admitted') then
      call('HSET', state, 'running', 1)
    end
    if find(operations, 'adapter') then
      call('HSET', state, 'adapter', ARGV[turn + 2])
    end
    if find(operations, 'last') then
      if ledgers[task] and call('HEXISTS', state, 'done') == 0 then
        pcall(enter, KEYS, ledgers[task], state, ARGV[turn + 4])
      end
      call('HSET', state, 'done', ARGV[turn + 2])
      call('HDEL', state, 'running')
    elseif find(operations, 'released') then
      call('HDEL', state, 'running')
    end
    if find(operations, 'look') then
      local kept = string.match(operations, 'ttl=(%d+)') or ttl
      call('PEXPIRE', log, kept)
      call('PEXPIRE', state, kept)
      if find(operations, 'last') then
        call('PEXPIRE', asked[task], kept)
      else
        if interests[task] and call('EXISTS', interests[task]) == 0 then
          code = UNREAD
        end
        if call('HEXISTS', asked[task], 'cancel') == 1 then
          code = FLAGGED
        end
      end
    end
  end
  return code, length, ends
end

for task = 0, tasks - 1 do
  local code, length, ends = unless_damaged(write, task)
  if code ~= 0 then
    for _, number in ipairs({task, code or DAMAGED, length or 0, ends or 0}) do
      reply[#reply + 1] = number
    end
  end
end
return reply
