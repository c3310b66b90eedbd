-- Store results and publish them.
--
-- KEYS  one per result
-- ARGV  TTL in seconds (0: none), then the results
for i, key in ipairs(KEYS) do
  local result = ARGV[i + 1]
  if ARGV[1] == '0' then
    redis.call('SET', key, result)
  else
    redis.call('SET', key, result, 'EX', ARGV[1])
  end
  redis.call('PUBLISH', key, result)
end
