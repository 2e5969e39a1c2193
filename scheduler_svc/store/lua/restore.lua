-- restore: write a leader's working copy back into a record that lost it (emptied), or lost the last of it (a crash
-- between two fsyncs). Besides submit the only transition that creates a request. Where the record
-- holds more, it stays. Limits are not asked: all of this was accepted before.
--   KEYS[1..4] the queue (see _common)
--   KEYS[5] sequence  string  raised to the entry's, if it is behind
--   then per entry
--     request      hash
--     tokens       string
--     payload      hash
--     idempotency  string; the request's key again when there is none
--   ARGV    leadership, shard_ttl_ms, then per entry
--     id, tenant, body_hash, sequence, prompt_tokens, lease_epoch, committed ids,
--     prompt, submission, length_features (empty: none), prompt_blocks (empty: none), prompt_logprobs (empty: none), n, then n strings:
--     field, value, … of the request hash
--   returns per entry OK, ALREADY (the record holds exactly this much), STALE (it holds more, or other tokens)
--           or GONE (it has ended); or {'fenced'}
local leadership, shard_ttl_ms = ARGV[1], ARGV[2]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local function restore(k, a)
    local request, tokens_key, payload, idempotency = KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 3]
    local id, tenant, body_hash, sequence, prompt_tokens = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3], ARGV[a + 4]
    local lease_epoch, committed = ARGV[a + 5], ARGV[a + 6]
    local was = redis.call('HMGET', request, 'state', 'lease_epoch')
    if was[1] == 'ended' then return GONE end

    if was[1] then
        local held = redis.call('GET', tokens_key) or ''
        if held == committed and was[2] == lease_epoch then return ALREADY end
        if tonumber(was[2]) > tonumber(lease_epoch) or string.sub(committed, 1, #held) ~= held then return STALE end
    else
        redis.call('ZADD', KEYS[UNFINISHED], sequence, id)
        redis.call('HINCRBY', KEYS[TENANTS], tenant, 1)
        redis.call('INCRBY', KEYS[PROMPT_TOKENS], prompt_tokens)
        redis.call('HSET', payload, 'prompt', ARGV[a + 7], 'submission', ARGV[a + 8])
        if ARGV[a + 9] ~= '' then redis.call('HSET', payload, 'length_features', ARGV[a + 9]) end
        if ARGV[a + 10] ~= '' then redis.call('HSET', payload, 'prompt_blocks', ARGV[a + 10]) end
        if idempotency ~= request then
            -- A request that its deadline ended has let the key go, perhaps to a newer one.
            local held_by = string.match(redis.call('GET', idempotency) or '', '^(%d+) ')
            if not held_by or tonumber(held_by) < tonumber(sequence) then
                redis.call('SET', idempotency, sequence .. ' ' .. id .. ' ' .. body_hash)
            end
        end
        if tonumber(redis.call('GET', KEYS[AFTER_QUEUE]) or 0) < tonumber(sequence) then
            redis.call('SET', KEYS[AFTER_QUEUE], sequence, 'PX', shard_ttl_ms)
        end
    end
    if ARGV[a + 11] ~= '' then redis.call('HSET', payload, 'prompt_logprobs', ARGV[a + 11]) end
    redis.call('HSET', request, unpack(ARGV, a + 13, a + 12 + ARGV[a + 12]))
    if committed ~= '' then redis.call('SET', tokens_key, committed) end
    return OK
end

local answers, k, a = {}, AFTER_QUEUE + 1, 3
while a <= #ARGV do
    answers[#answers + 1] = restore(k, a)
    k, a = k + 4, a + 13 + ARGV[a + 12]
end
return answers
