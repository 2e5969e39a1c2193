-- renew: the leader stays the leader. A lease that ran out is taken up again under the same epoch when nobody has led
-- since (the counter still stands at its number): a stall of the server alone changes no leader.
--   KEYS    as acquire
--   ARGV    leadership ("epoch owner"), lease_ms, number, incarnation, shard_ttl_ms
--   returns {1} | {0} when another leader is or was in force, or the data is another
local leadership, lease_ms, number, incarnation, shard_ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local leader = redis.call('GET', KEYS[1])
if leader and leader ~= leadership then return {0} end
if redis.call('GET', KEYS[2]) ~= number or redis.call('GET', KEYS[4]) ~= incarnation then return {0} end
redis.call('SET', KEYS[1], leadership, 'PX', lease_ms)
for i = 2, 6 do redis.call('PEXPIRE', KEYS[i], shard_ttl_ms) end
return {1}
