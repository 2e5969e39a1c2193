-- claim: the first shard that asks decides about an idempotency key, for all shards. Not fenced, and KEYS[1] is no leader key:
-- it lies in a slot of its own. A claim that a leader of the past makes leads to the shard's leader of now.
--   KEYS[1] claim  string  "shard request-id", the id of the newest submission with the key
--   ARGV    shard, request_id, ttl_ms
--   returns {the shard that decides}
local shard, request_id, ttl_ms = ARGV[1], ARGV[2], ARGV[3]

local owner = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) ')
if owner and owner ~= shard then return {owner} end
redis.call('SET', KEYS[1], shard .. ' ' .. request_id, 'PX', ttl_ms)
return {shard}
