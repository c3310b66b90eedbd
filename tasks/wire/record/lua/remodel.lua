-- Record the model that continues tasks which another model began.
--
-- KEYS  one per task: state
-- ARGV  model; then one per task: the attempt that continues the task
-- A task that a newer attempt owns, or whose keys are damaged, is left as it is.
local function record(i)
  if redis.call('HGET', KEYS[i], 'attempt') == ARGV[i + 1] then
    redis.call('HSET', KEYS[i], 'model', ARGV[1])
  end
end

for i = 1, #KEYS do
  unless_damaged(record, i)
end
