-- reclaimed: the leader has written back all that it holds; from now on a standby may lead as soon as the lease runs out.
--   KEYS[1] leader   string
--   KEYS[2] server   string  see acquire
--   ARGV    leadership, shard_ttl_ms
--   returns {1} | {'fenced'}
local leadership, shard_ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end
redis.call('SET', KEYS[2], server_id(), 'PX', shard_ttl_ms)
return {1}
