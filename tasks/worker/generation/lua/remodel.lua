-- Record the model that goes on with tasks whose tokens another one began.
--
-- KEYS  one per task: state
-- ARGV  model; then one per task: the attempt that goes on
-- A task that a newer attempt owns, or whose keys are damaged, is left as it is.
local function record(i)
  if redis.call('HGET', KEYS[i], 'attempt') == ARGV[i + 1] then
    redis.call('HSET', KEYS[i], 'model', ARGV[1])
  end
end

for i = 1, #KEYS do
  unless_damaged(record, i)
end
