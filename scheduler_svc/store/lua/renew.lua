-- renew: the leader stays the leader. A lease that ran out is taken up again under the same epoch when no other leader came
-- after it (the counter still stands at its number): a stall of the server alone changes no leader. A lease that has not
-- run out is only lengthened, which a full server allows too.
--   KEYS    as acquire
--   ARGV    leadership ("epoch owner"), lease_ms, number, incarnation, shard_ttl_ms
--   returns {1} | {0} when another leader is or was in force
--           | {2} when this is the newest leader, but the data was lost or may be older than what it wrote: see reclaim.
--             A leader of a smaller number, which can come up on older data, does not count.
--           While a leader writes back, its lease is renewed as long as it has not run out.
local leadership, lease_ms, number, incarnation, shard_ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local leader = redis.call('GET', KEYS[1])
local count, found = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[4])
if is_newer_leader(leader, leadership, number) then return {0} end
if found and found ~= incarnation or count and tonumber(count) > tonumber(number) then return {0} end
local leads = leader == leadership
if leads then redis.call('PEXPIRE', KEYS[1], lease_ms) end
local server = redis.call('GET', KEYS[7])
if not found or count ~= number or server ~= server_id() and not (leads and server == BEHIND) then return {2} end
if not leader then redis.call('SET', KEYS[1], leadership, 'PX', lease_ms) end
for i = 2, 8 do redis.call('PEXPIRE', KEYS[i], shard_ttl_ms) end
return {1}
