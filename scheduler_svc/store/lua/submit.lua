-- submit: new requests join the queue, each if the limits allow it and its idempotency key is new. One that the record has lost
-- comes again with the tokens that were shown of it, and goes on behind them. Each entry sees those before it.
--   KEYS[1..4] the queue (see _common)
--   KEYS[5] sequence     string  counter
--   then per entry
--     request      hash    created here
--     payload      hash    created here
--     tokens       string  created here if tokens were shown
--     idempotency  string  "sequence request-id body-hash"; the request's key again when the client gave none
--   ARGV    leadership, max_requests, max_prompt_tokens, max_requests_per_tenant (-1: no limit), shard_ttl_ms, then per entry
--     id, tenant, body_hash, prompt_tokens (-1: it joins only if it is known), prompt, submission, length_features (empty: none),
--     prompt_blocks (empty: none), shown, n, then n strings: field, value, … of the request hash
--   returns per entry {'accepted' | 'attached' | 'conflict', request id, sequence} | {'queue_full' | 'tenant_full' | 'unknown', id, 0};
--           or {'fenced'}; 'accepted' also when this very request is on the record already: a retry.
local leadership, max_requests, max_prompt_tokens, max_per_tenant = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local requests = redis.call('ZCARD', KEYS[UNFINISHED])
local queued = tonumber(redis.call('GET', KEYS[PROMPT_TOKENS]) or 0)
local joined, added, of_tenant, added_of = {}, 0, {}, {}  -- what the queue gets at the end

local function submit(k, a)
    local request, payload, idempotency = KEYS[k], KEYS[k + 1], KEYS[k + 3]
    local id, tenant, body_hash, prompt_tokens = ARGV[a], ARGV[a + 1], ARGV[a + 2], tonumber(ARGV[a + 3])
    local known = redis.call('HMGET', request, 'body_hash', 'sequence')
    if known[1] then return {known[1] == body_hash and 'accepted' or 'conflict', id, tonumber(known[2])} end

    local entry = idempotency ~= request and redis.call('GET', idempotency)
    if entry then
        local sequence, other, hash = string.match(entry, '^(%d+) (%S+) (.*)$')
        return {hash == body_hash and 'attached' or 'conflict', other, tonumber(sequence)}
    end

    if prompt_tokens < 0 then return {'unknown', id, 0} end
    if max_requests >= 0 and requests >= max_requests then return {'queue_full', id, 0} end
    if max_prompt_tokens >= 0 and queued + prompt_tokens > max_prompt_tokens then return {'queue_full', id, 0} end
    of_tenant[tenant] = of_tenant[tenant] or tonumber(redis.call('HGET', KEYS[TENANTS], tenant) or 0)
    if max_per_tenant >= 0 and of_tenant[tenant] >= max_per_tenant then return {'tenant_full', id, 0} end

    local sequence = redis.call('INCR', KEYS[AFTER_QUEUE])
    if sequence == 1 then redis.call('PEXPIRE', KEYS[AFTER_QUEUE], ARGV[5]) end
    redis.call('HSET', request, 'state', 'queued', 'score', sequence, 'sequence', sequence, unpack(ARGV, a + 10, a + 9 + ARGV[a + 9]))
    local fields = {'prompt', ARGV[a + 4], 'submission', ARGV[a + 5]}
    for at, field in ipairs({'length_features', 'prompt_blocks'}) do
        if ARGV[a + 5 + at] ~= '' then
            fields[#fields + 1] = field
            fields[#fields + 1] = ARGV[a + 5 + at]
        end
    end
    redis.call('HSET', payload, unpack(fields))
    if ARGV[a + 8] ~= '' then redis.call('SET', KEYS[k + 2], ARGV[a + 8]) end
    if idempotency ~= request then redis.call('SET', idempotency, sequence .. ' ' .. id .. ' ' .. body_hash) end
    requests, of_tenant[tenant] = requests + 1, of_tenant[tenant] + 1
    queued, added = queued + prompt_tokens, added + prompt_tokens
    added_of[tenant] = (added_of[tenant] or 0) + 1
    joined[#joined + 1] = sequence
    joined[#joined + 1] = id
    return {'accepted', id, sequence}
end

local answers, k, a = {}, AFTER_QUEUE + 1, 6
while a <= #ARGV do
    answers[#answers + 1] = submit(k, a)
    k, a = k + 4, a + 10 + ARGV[a + 9]
end
if #joined > 0 then
    redis.call('ZADD', KEYS[UNFINISHED], unpack(joined))
    redis.call('INCRBY', KEYS[PROMPT_TOKENS], added)
    for tenant, count in pairs(added_of) do redis.call('HINCRBY', KEYS[TENANTS], tenant, count) end
end
return answers
