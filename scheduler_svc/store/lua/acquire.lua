-- acquire: become the leader, if nobody is.
--   KEYS[1] leader           string  "epoch owner", lives as long as the lease
--   KEYS[2] leader_count     string  number of the newest epoch
--   KEYS[3] schema_version   string
--   KEYS[4] incarnation      string
--   KEYS[5] sequence         string
--   KEYS[6] priors           string
--   ARGV    nonce, owner, lease_ms, schema_version, new_incarnation, above, known_incarnation, shard_ttl_ms
--             above: the new number is larger than this and than any before (the counter may have been lost)
--             known_incarnation: of the data as the caller last saw it; empty when it has not, or has waited long enough
--   returns {'ok', epoch, incarnation} | {'taken', incarnation or ''} | {'schema', version on the record}
--           | {'emptied'} when the caller has seen data and there is none any more: the last leader goes first
--           'ok' also when this very nonce leads: a retry.
local nonce, owner, lease_ms, schema, new_incarnation = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local above, known_incarnation, shard_ttl_ms = tonumber(ARGV[6]), ARGV[7], ARGV[8]

local found = redis.call('GET', KEYS[3])
if found and found ~= schema then return {'schema', found} end
local incarnation = redis.call('GET', KEYS[4])
local leader = redis.call('GET', KEYS[1])
if leader then
    local mine = string.match(leader, '^(%d+:' .. nonce .. ') ')
    if not mine then return {'taken', incarnation or ''} end
    redis.call('PEXPIRE', KEYS[1], lease_ms)
    return {'ok', mine, incarnation}
end
if known_incarnation ~= '' and not incarnation then return {'emptied'} end

local number = math.max(tonumber(redis.call('GET', KEYS[2]) or 0), above) + 1
local epoch = string.format('%d:%s', number, nonce)
redis.call('SET', KEYS[1], epoch .. ' ' .. owner, 'NX', 'PX', lease_ms)
redis.call('SET', KEYS[2], string.format('%d', number))
redis.call('SET', KEYS[3], schema)
redis.call('SET', KEYS[4], new_incarnation, 'NX')
for i = 2, 6 do redis.call('PEXPIRE', KEYS[i], shard_ttl_ms) end
return {'ok', epoch, redis.call('GET', KEYS[4])}
