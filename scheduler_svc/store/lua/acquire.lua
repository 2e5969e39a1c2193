-- acquire: become the leader if there is none and no earlier leader can hold more than the record.
--   KEYS[1] leader           string  "epoch owner", lives as long as the lease
--   KEYS[2] leader_count     string  number of the newest epoch
--   KEYS[3] schema_version   string
--   KEYS[4] incarnation      string
--   KEYS[5] sequence         string
--   KEYS[6] priors           string
--   KEYS[7] server           string  run id of the server that holds all that the last leader wrote, or BEHIND
--   KEYS[8] log              stream
--   KEYS[9…]                 keys of the layout before the log, which go
--   ARGV    nonce, owner, lease_ms, schema_version, new_incarnation, newest_known, known_incarnation, in_doubt, waited_for, shard_ttl_ms
--             newest_known: number of the newest epoch that the caller has seen; the new number is larger
--             known_incarnation: of the data when the caller last saw it, or empty
--             in_doubt: '1' when the caller could not reach the record since it last saw a leader
--             waited_for: the state in which the last leader had its time to come back, as 'older' returned it, or empty
--   returns {'ok', epoch, incarnation} | {'taken', incarnation or ''} | {'schema', version on the record}
--           | {'older', state}: the record may have lost the last of what was written. A leader that is alive holds it, and goes first.
--             Another loss has another state: the server is another process then.
--           'ok' also when this very nonce leads: a retry.
local nonce, owner, lease_ms, schema, new_incarnation = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local newest_known, known_incarnation, in_doubt, waited_for = tonumber(ARGV[6]), ARGV[7], ARGV[8] == '1', ARGV[9]
local shard_ttl_ms = ARGV[10]

local found = redis.call('GET', KEYS[3])
-- The layout before the log (1) has all progress in the requests' own keys: it is read as it stands.
if found and found ~= schema and found ~= '1' then return {'schema', found} end
local incarnation = redis.call('GET', KEYS[4])
local leader = redis.call('GET', KEYS[1])
if leader then
    local mine = string.match(leader, '^(%d+:' .. nonce .. ') ')
    if not mine then
        -- Longer than a lease lasts: the server's clock was set back since. It may be that this server takes no writes at present.
        redis.pcall('PEXPIRE', KEYS[1], lease_ms, 'LT')
        return {'taken', incarnation or ''}
    end
    redis.call('PEXPIRE', KEYS[1], lease_ms)
    return {'ok', mine, incarnation}
end

local count = tonumber(redis.call('GET', KEYS[2]) or 0)
local server, this_server = redis.call('GET', KEYS[7]), server_id()
local may_be_older = known_incarnation ~= '' and not incarnation  -- it was emptied
    or count < newest_known                                       -- it lacks an epoch that the caller has seen
    or server and (server ~= this_server or in_doubt)             -- its server was restarted or replaced; no leader resigned
local state = string.format('%s %s %d', server or '', this_server, count)
if may_be_older and waited_for ~= state then return {'older', state} end

local number = math.max(count, newest_known) + 1
local epoch = string.format('%d:%s', number, nonce)
-- The first write takes no memory: a server that refuses growth still gets a leader, under which requests end.
redis.call('PEXPIRE', KEYS[2], shard_ttl_ms)
redis.call('SET', KEYS[1], epoch .. ' ' .. owner, 'NX', 'PX', lease_ms)
redis.call('SET', KEYS[2], string.format('%d', number))
redis.call('SET', KEYS[3], schema)
redis.call('SET', KEYS[4], new_incarnation, 'NX')
redis.call('SET', KEYS[7], this_server)
for i = 2, 8 do redis.call('PEXPIRE', KEYS[i], shard_ttl_ms) end
if found == '1' then redis.call('DEL', unpack(KEYS, 9)) end
return {'ok', epoch, redis.call('GET', KEYS[4])}
