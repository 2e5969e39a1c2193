-- save_priors: keep what the policy has learnt.
--   KEYS[1] leader   string
--   KEYS[2] priors   string, opaque
--   ARGV    leadership, priors, shard_ttl_ms
--   returns {1} | {'fenced'}
local leadership, priors, shard_ttl_ms = ARGV[1], ARGV[2], ARGV[3]

if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end
redis.call('SET', KEYS[2], priors, 'PX', shard_ttl_ms)
return {1}
