-- Stands in front of every script: the answers per entry, and the moves that several transitions share.
--
-- Rules of all scripts
--   * KEYS[1] is the leader key and ARGV[1] the caller's leadership; when they differ the answer is {'fenced'}
--     and nothing has changed. (claim and unclaim are no business of one leader: see there.)
--   * Time comes as an argument. Every key comes in KEYS.
--   * Numbers are stored as the caller wrote them.
local OK, ALREADY, STALE, GONE = 0, 1, 2, 3

-- Value of the key `server` while a leader writes back what the record has lost.
local BEHIND = 'behind'

-- Returns what tells one life of a server process from another; the same word always where the user may not run INFO.
local function server_id()
    local info = redis.pcall('INFO', 'server')
    return type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
end

-- Whether another process leads whose epoch is not older than the caller's.
local function is_newer_leader(leader, leadership, number)
    if not leader or leader == leadership then return false end
    return tonumber(string.match(leader, '^(%d+):')) >= tonumber(number)
end

-- KEYS that every script about the queue begins with:
--   [1] leader   [2] unfinished   [3] tenants   [4] prompt_tokens
local UNFINISHED, TENANTS, PROMPT_TOKENS, AFTER_QUEUE = 2, 3, 4, 5

-- Takes a request of this tenant, with so many tokens of prompt, out of the queue.
local function leave_queue(id, tenant, prompt_tokens)
    redis.call('ZREM', KEYS[UNFINISHED], id)
    if redis.call('HINCRBY', KEYS[TENANTS], tenant, -1) <= 0 then redis.call('HDEL', KEYS[TENANTS], tenant) end
    if redis.call('DECRBY', KEYS[PROMPT_TOKENS], prompt_tokens) <= 0 then redis.call('DEL', KEYS[PROMPT_TOKENS]) end
end

-- Whether the entry of the idempotency key is this request's. A newer request may have the key by then.
local function has_key(id, request, idempotency)
    return idempotency ~= request and string.match(redis.call('GET', idempotency) or '', '^%d+ (%S+) ') == id
end

-- Ends the request for good: out of the queue, its last tokens appended, its keys expiring.
--   k         index of its keys: request, tokens, payload, idempotency
--   tenant, prompt_tokens   as the record has them
--   fresh     tokens that its own keys lack
--   ending    reason, cut_characters, detail, story
--   progress  field, value, … of its standing
-- A deadline is the caller's, and not part of what an idempotency key stands for: a request that one ended lets
-- its key go, so that a retry with more time runs. A newer request may have the key by then; it keeps it.
-- The first write frees memory: a server that refuses growth still lets a request end.
local function end_request(id, k, tenant, prompt_tokens, fresh, ending, progress, now_ms, ttl_ms)
    local request, tokens, payload, idempotency = KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 3]
    leave_queue(id, tenant, prompt_tokens)
    if fresh ~= '' then redis.call('APPEND', tokens, fresh) end
    redis.call('HSET', request, 'state', 'ended', 'worker', '', 'end', ending.reason,
        'cut_characters', ending.cut_characters, 'detail', ending.detail, 'ended_unix_ms', now_ms, unpack(progress))
    redis.call('HSET', payload, 'story', ending.story)
    redis.call('HDEL', payload, 'length_features', 'prompt_blocks')
    redis.call('PEXPIRE', request, ttl_ms)
    redis.call('PEXPIRE', tokens, ttl_ms)
    redis.call('PEXPIRE', payload, ttl_ms)
    if has_key(id, request, idempotency) then
        if ending.reason == 'deadline' then redis.call('DEL', idempotency) else redis.call('PEXPIRE', idempotency, ttl_ms) end
    end
end

