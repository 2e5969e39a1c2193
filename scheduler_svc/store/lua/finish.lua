-- finish: end requests that no report ends (cancelled, out of time, failed), whoever holds the lease.
--   KEYS[1..4] the queue (see _common), then per entry
--     request      hash
--     tokens       string
--     payload      hash
--     idempotency  string; the request's key again when there is none
--   ARGV    leadership, now_ms, ttl_ms, then per entry
--     id, end, detail, story, rounds, drafts, drafted, accepted, attained_s, preemptions, level, score, position, count, tokens
--             from the position on: tokens that only the log holds
--   returns per entry OK, ALREADY (it ended this way), STALE (tokens before the position are missing) or GONE (missing, or
--           ended otherwise); or {'fenced'}
local leadership, now_ms, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local answers, k = {}, AFTER_QUEUE
for a = 4, #ARGV, 15 do
    local request, reason, position = KEYS[k], ARGV[a + 1], tonumber(ARGV[a + 12])
    local was = redis.call('HMGET', request, 'state', 'end', 'committed', 'tenant', 'prompt_tokens')
    local answer = GONE
    if was[1] == 'ended' then
        if was[2] == reason then answer = ALREADY end
    elseif was[1] and tonumber(was[3]) < position then
        answer = STALE
    elseif was[1] then
        local committed, reached, fresh = tonumber(was[3]), position + ARGV[a + 13], ''
        if committed < reached then fresh = string.sub(ARGV[a + 14], (committed - position) * 4 + 1) end
        end_request(ARGV[a], k, was[4], was[5], fresh, {
            reason = reason, cut_characters = '0', detail = ARGV[a + 2], story = ARGV[a + 3],
        }, {'committed', string.format('%d', math.max(committed, reached)), 'rounds', ARGV[a + 4], 'drafts', ARGV[a + 5],
            'drafted', ARGV[a + 6], 'accepted', ARGV[a + 7], 'attained_s', ARGV[a + 8], 'preemptions', ARGV[a + 9],
            'level', ARGV[a + 10], 'score', ARGV[a + 11]}, now_ms, ttl_ms)
        answer = OK
    end
    answers[#answers + 1] = answer
    k = k + 4
end
return answers
