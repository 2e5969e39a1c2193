-- reclaimed: the leader has written back all that it holds; from now on a standby may lead as soon as the lease runs out.
--   KEYS[1] leader   string
--   KEYS[2] server   string  see acquire
--   KEYS[3] log      stream  deleted if all that it holds has been written back into the requests' own keys
--   ARGV    leadership, shard_ttl_ms, written_back ('1' or '0')
--   returns {1} | {'fenced'}
local leadership, shard_ttl_ms = ARGV[1], ARGV[2]

if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end
redis.call('SET', KEYS[2], server_id(), 'PX', shard_ttl_ms)
if ARGV[3] == '1' then redis.call('DEL', KEYS[3]) end
return {1}
