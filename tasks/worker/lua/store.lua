-- Store results and tell who waits for them.
--
-- KEYS  one a result
-- ARGV  seconds until they expire (0: never), then one a result
for i, key in ipairs(KEYS) do
  local result = ARGV[i + 1]
  if ARGV[1] == '0' then
    redis.call('SET', key, result)
  else
    redis.call('SET', key, result, 'EX', ARGV[1])
  end
  redis.call('PUBLISH', key, result)
end
