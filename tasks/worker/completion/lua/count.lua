-- Count a task in its chord by Celery's script, which stands before this one as `counted`. If the chord is complete,
-- the task that claims its body may claim it again.
--
-- KEYS  those of Celery's script (the sixth: the claim), then which task the claim is for
-- ARGV  those of Celery's script: the first is the task, the seventh the TTL of a claim in seconds, the eighth a new
--       claim
-- reply {number of tasks counted, how many more the chord has than its size, size, 1 if this call has the claim, 1 if
--       it is unknown which task has it}
--
-- A task that is not counted again has its claim from this call. If another task has the claim, that task's message
-- comes again until its body is sent.
local TASK, TTL, NEW = ARGV[1], ARGV[7], ARGV[8]
local KEPT_S = 3600
local answer = counted()
local number, more, size, claimed = answer[1], answer[2], answer[3], answer[4]
if number == -1 or not size or number ~= tonumber(size) + tonumber(more or 0) then
  return {number, more, size, claimed, 0}
end
if claimed == 0 then
  local noted = redis.call('HMGET', KEYS[7], 'claim', 'task')
  if noted[1] ~= redis.call('GET', KEYS[6]) then
    return {number, more, size, 0, 1}
  elseif noted[2] ~= TASK then
    return {number, more, size, 0, 0}
  end
  redis.call('SET', KEYS[6], NEW, 'EX', TTL)
end
redis.call('HSET', KEYS[7], 'claim', NEW, 'task', TASK)
redis.call('EXPIRE', KEYS[7], KEPT_S)
return {number, more, size, 1, 0}
