-- submit: a new request joins the queue, if the limits allow it and its idempotency key is new. One that the record has lost
-- comes again with the tokens that were shown of it, and goes on behind them.
--   KEYS[1] leader       string
--   KEYS[2] unfinished   zset    request id -> sequence
--   KEYS[3] tenants      hash    tenant -> unfinished requests
--   KEYS[4] reserved     string  tokens of all unfinished requests
--   KEYS[5] sequence     string  counter
--   KEYS[6] request      hash    created here
--   KEYS[7] payload      hash    created here
--   KEYS[8] tokens       string  created here if tokens were shown
--   KEYS[9] idempotency string  "sequence request-id body-hash"; the request's key again when the client gave none
--   ARGV    leadership, id, tenant, body_hash, tokens, max_requests, max_tokens, max_requests_per_tenant (-1: no limit),
--           shard_ttl_ms, prompt, submission, length_features (empty: none), shown, then field, value, … of the request hash
--   returns {'accepted' | 'attached' | 'conflict', request id, sequence} | {'queue_full' | 'tenant_full', id, 0}
--           | {'fenced'}; 'accepted' also when this very request is on the record already: a retry.
local leadership, id, tenant, body_hash, tokens = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local max_requests, max_tokens, max_per_tenant = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local shard_ttl_ms, prompt, submission, length_features, shown = ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13]
local FIRST_FIELD = 14
local request, payload, idempotency = KEYS[6], KEYS[7], KEYS[9]
local is_idempotent = idempotency ~= request

if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local known = redis.call('HMGET', request, 'body_hash', 'sequence')
if known[1] then return {known[1] == body_hash and 'accepted' or 'conflict', id, tonumber(known[2])} end

local entry = is_idempotent and redis.call('GET', idempotency)
if entry then
    local sequence, other, hash = string.match(entry, '^(%d+) (%S+) (.*)$')
    return {hash == body_hash and 'attached' or 'conflict', other, tonumber(sequence)}
end

if max_requests >= 0 and redis.call('ZCARD', KEYS[2]) >= max_requests then return {'queue_full', id, 0} end
if max_tokens >= 0 and (redis.call('GET', KEYS[4]) or 0) + tokens > max_tokens then return {'queue_full', id, 0} end
if max_per_tenant >= 0 and tonumber(redis.call('HGET', KEYS[3], tenant) or 0) >= max_per_tenant then
    return {'tenant_full', id, 0}
end

local sequence = redis.call('INCR', KEYS[5])
if sequence == 1 then redis.call('PEXPIRE', KEYS[5], shard_ttl_ms) end
redis.call('HSET', request, 'state', 'queued', 'score', sequence, 'sequence', sequence, unpack(ARGV, FIRST_FIELD))
redis.call('HSET', payload, 'prompt', prompt, 'submission', submission)
if length_features ~= '' then redis.call('HSET', payload, 'length_features', length_features) end
if shown ~= '' then redis.call('SET', KEYS[8], shown) end
if is_idempotent then redis.call('SET', idempotency, sequence .. ' ' .. id .. ' ' .. body_hash) end
redis.call('ZADD', KEYS[2], sequence, id)
redis.call('HINCRBY', KEYS[3], tenant, 1)
redis.call('INCRBY', KEYS[4], tokens)
return {'accepted', id, sequence}
