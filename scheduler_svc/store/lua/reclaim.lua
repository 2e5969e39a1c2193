-- reclaim: the last leader leads on, under its epoch, over a record that was emptied or has lost the last of what was
-- written. What it still holds comes back by restore, then by reclaimed; no other process may lead in between, not even
-- after the lease has run out, unless this one stays away.
--   KEYS    as acquire
--   ARGV    leadership ("epoch owner"), lease_ms, number, incarnation, new_incarnation, schema_version, sequence, shard_ttl_ms
--             new_incarnation: of the data if it was emptied
--             sequence: the newest that was ever given; none of them is given again
--   returns {1, incarnation} | {0} when another leader is or was in force
local leadership, lease_ms, number, incarnation = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local new_incarnation, schema, sequence, shard_ttl_ms = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

local leader = redis.call('GET', KEYS[1])
local count, found = redis.call('GET', KEYS[2]), redis.call('GET', KEYS[4])
if is_newer_leader(leader, leadership, number) then return {0} end
if found and found ~= incarnation and found ~= new_incarnation then return {0} end
if count and tonumber(count) > tonumber(number) then return {0} end

redis.call('SET', KEYS[1], leadership, 'PX', lease_ms)
redis.call('SET', KEYS[2], number)
redis.call('SET', KEYS[3], schema)
redis.call('SET', KEYS[4], new_incarnation, 'NX')
redis.call('SET', KEYS[7], BEHIND)
if tonumber(redis.call('GET', KEYS[5]) or 0) < tonumber(sequence) then redis.call('SET', KEYS[5], sequence) end
for i = 2, 8 do redis.call('PEXPIRE', KEYS[i], shard_ttl_ms) end
return {1, redis.call('GET', KEYS[4])}
