-- append: write the progress of one turn, for any number of requests, behind the newest entry of the log.
--   KEYS[1] leader   string
--   KEYS[2] log      stream  id `number-0`, field `p`: what `log.py` packs
--   ARGV    leadership, after, number, folded, shard_ttl_ms, progress
--             after: id of the newest entry that the caller knows; empty for the first entry of a log
--             folded: entries below this number are in the requests' own keys, and go
--   returns {OK} | {ALREADY}: the very entry is the newest | {'behind'}: another one is, or an earlier one is missing
--           | {'fenced'}
local leadership, after, number, folded, shard_ttl_ms, progress = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

-- Entries go from the oldest on: where `after` is there and none comes after it, it is the newest that there ever was.
local id, rest = number .. '-0', after ~= '' and redis.call('XRANGE', KEYS[2], after, '+', 'COUNT', 2) or {}
if #rest ~= 1 or rest[1][1] ~= after then
    -- The stream knows the id of its newest entry also when that has gone.
    local newest, entry = '', false
    if redis.call('EXISTS', KEYS[2]) == 1 then
        local info = redis.call('XINFO', 'STREAM', KEYS[2])
        for i = 1, #info, 2 do
            if info[i] == 'last-generated-id' then newest = info[i + 1] end
            if info[i] == 'last-entry' then entry = info[i + 1] end
        end
    end
    if newest ~= after then
        return {newest == id and entry and entry[2][2] == progress and ALREADY or 'behind'}
    end
end
redis.call('XADD', KEYS[2], 'MINID', folded, id, 'p', progress)
if after == '' then redis.call('PEXPIRE', KEYS[2], shard_ttl_ms) end
return {OK}
