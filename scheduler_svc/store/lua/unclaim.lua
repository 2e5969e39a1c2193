-- unclaim: let an idempotency key go. At once when its submission was refused, so that another shard may take it, unless a newer
-- one has claimed it since; after a while when its request has ended.
--   KEYS[1] claim  string  "shard request-id"; see claim
--   ARGV    shard, request_id (empty: any), ttl_ms (0: at once)
--   returns {1} | {0} when nothing was changed
local shard, request_id, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3])

local owner, newest = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (.*)$')
if owner ~= shard or request_id ~= '' and newest ~= request_id then return {0} end
if ttl_ms == 0 then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ttl_ms) end
return {1}
