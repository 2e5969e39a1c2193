-- save_learnt: keep what the policy, or the probes of the workers, have learnt.
--   KEYS[1] leader   string
--   KEYS[2] priors or probes   string, opaque
--   ARGV    leadership, learnt, shard_ttl_ms
--   returns {1} | {'fenced'}
local leadership, learnt, shard_ttl_ms = ARGV[1], ARGV[2], ARGV[3]

if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end
redis.call('SET', KEYS[2], learnt, 'PX', shard_ttl_ms)
return {1}
