-- commit: append tokens to requests, and end those that say so, each only if the lease epoch and the position before
-- are still the record's. Progress without an end goes into the log (append); it comes here only where the leader's copy does
-- not expect it, and the record decides. An end brings the tokens that only the log holds along.
--   KEYS[1..4] the queue (see _common), then per entry
--     request      hash
--     tokens       string  little-endian int32 per committed token
--     and, when the entry has an end:
--     payload      hash
--     idempotency  string; the request's key again when there is none
--   ARGV    leadership, now_ms, ttl_ms, then per entry
--     id, lease_epoch, position, count, tokens, rounds, drafts, drafted, accepted, attained_s, preemptions, level, score,
--     end; and, when end is not empty: cut_characters, detail, story, logged, first_token_unix_ms (empty: known, or none)
--             logged: so many of the tokens, the first ones, are in the log, so that the own keys may hold some of them
--   returns per entry OK, ALREADY, STALE or GONE; or {'fenced'}
--     ALREADY: the very tokens stand at that position (with an end: and the request ended with it). That may have been
--     under an older lease than the record's newest: a batch can commit and lease anew, and be sent twice.
local leadership, now_ms, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local function commit(k, a)
    local request, tokens_key = KEYS[k], KEYS[k + 1]
    local id, lease_epoch, position, count, tokens = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
    local rounds, attained_s, level, score, reason = ARGV[a + 5], ARGV[a + 9], ARGV[a + 11], ARGV[a + 12], ARGV[a + 13]
    local was = redis.call('HMGET', request, 'state', 'lease_epoch', 'committed', 'rounds', 'attained_s', 'end', 'tenant',
        'prompt_tokens')
    local state, record_epoch, committed = was[1], was[2], tonumber(was[3])
    if not state then return GONE end

    local reached = position + count
    local function on_record()
        if reached > committed or tonumber(lease_epoch) > tonumber(record_epoch) then return false end
        if count == '0' then return tonumber(rounds) <= tonumber(was[4]) end
        return redis.call('GETRANGE', tokens_key, position * 4, reached * 4 - 1) == tokens
    end
    if state == 'ended' then
        return (reason == '' or reason == was[6]) and on_record() and ALREADY or GONE
    end
    local known = committed - position
    local follows = known == 0
    if known > 0 and reason ~= '' and known <= tonumber(ARGV[a + 17]) then
        follows = redis.call('GETRANGE', tokens_key, position * 4, committed * 4 - 1) == string.sub(tokens, 1, known * 4)
    end
    local nothing_new = count == '0' and reason == '' and rounds == was[4] and attained_s == was[5]
    if record_epoch ~= lease_epoch or not follows or nothing_new then
        return reason == '' and on_record() and ALREADY or STALE
    end

    local progress = {'committed', string.format('%d', reached), 'rounds', rounds, 'drafts', ARGV[a + 6], 'drafted', ARGV[a + 7],
        'accepted', ARGV[a + 8], 'attained_s', attained_s, 'preemptions', ARGV[a + 10], 'level', level, 'score', score}
    local first_ms = reason ~= '' and ARGV[a + 18] or position == '0' and count ~= '0' and now_ms or ''
    if first_ms ~= '' then
        progress[#progress + 1] = 'first_token_unix_ms'
        progress[#progress + 1] = first_ms
    end
    local fresh = known > 0 and string.sub(tokens, known * 4 + 1) or tokens
    if reason ~= '' then
        end_request(id, k, was[7], was[8], fresh, {
            reason = reason, cut_characters = ARGV[a + 14], detail = ARGV[a + 15], story = ARGV[a + 16],
        }, progress, now_ms, ttl_ms)
    else
        if fresh ~= '' then redis.call('APPEND', tokens_key, fresh) end
        redis.call('HSET', request, unpack(progress))
    end
    return OK
end

local answers, k, a = {}, AFTER_QUEUE, 4
while a <= #ARGV do
    answers[#answers + 1] = commit(k, a)
    if ARGV[a + 13] == '' then k, a = k + 2, a + 14 else k, a = k + 4, a + 19 end
end
return answers
