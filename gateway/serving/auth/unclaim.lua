-- Give an `Idempotency-Key` back, unless another request has it meanwhile.
--
-- KEYS  the claim
-- ARGV  the claim as it was read
-- reply 1, or 0 if it is another one
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
