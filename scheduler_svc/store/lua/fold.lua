-- fold: write what the log holds of requests into their own keys, so that its entries can go.
--   KEYS[1] leader   string
--   then per entry
--     request      hash
--     tokens       string
--   ARGV    leadership, then per entry
--     position, count, tokens, first_token_unix_ms (empty: unknown), rounds, drafts, drafted, accepted, attained_s,
--     preemptions, level, score
--   returns per entry OK (its keys hold the tokens now, or held them before), STALE (tokens before the position are
--           missing, or others stand there) or GONE (missing or ended); or {'fenced'}
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end

local function fold(k, a)
    local request, tokens_key, position, tokens, first_token_unix_ms = KEYS[k], KEYS[k + 1], tonumber(ARGV[a]), ARGV[a + 2], ARGV[a + 3]
    local was = redis.call('HMGET', request, 'state', 'committed', 'rounds')
    if not was[1] or was[1] == 'ended' then return GONE end

    local committed, reached = tonumber(was[2]), position + ARGV[a + 1]
    if committed < position then return STALE end
    local known = math.min(committed, reached) - position
    if known > 0 and redis.call('GETRANGE', tokens_key, position * 4, (position + known) * 4 - 1) ~= string.sub(tokens, 1, known * 4) then
        return STALE
    end
    if committed < reached then redis.call('APPEND', tokens_key, string.sub(tokens, known * 4 + 1)) end
    redis.call('HSET', request, 'committed', string.format('%d', math.max(committed, reached)))
    if tonumber(ARGV[a + 4]) >= tonumber(was[3]) then  -- else a call that was sent long ago
        redis.call('HSET', request, 'rounds', ARGV[a + 4], 'drafts', ARGV[a + 5], 'drafted', ARGV[a + 6],
            'accepted', ARGV[a + 7], 'attained_s', ARGV[a + 8], 'preemptions', ARGV[a + 9], 'level', ARGV[a + 10], 'score', ARGV[a + 11])
    end
    if first_token_unix_ms ~= '' then redis.call('HSETNX', request, 'first_token_unix_ms', first_token_unix_ms) end
    return OK
end

local answers = {}
for k = 2, #KEYS, 2 do answers[#answers + 1] = fold(k, 2 + (k - 2) * 6) end
return answers
