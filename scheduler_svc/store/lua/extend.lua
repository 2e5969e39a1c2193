-- extend: give an unfinished request more time, because a later submission with its idempotency key has more.
--   KEYS[1] leader   string
--   KEYS[2] request  hash
--   ARGV    leadership, deadline_unix_ms (empty: none)
--   returns {OK} | {GONE} when it has ended or is missing; or {'fenced'}
local leadership, deadline_unix_ms = ARGV[1], ARGV[2]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local state = redis.call('HGET', KEYS[2], 'state')
if not state or state == 'ended' then return {GONE} end
redis.call('HSET', KEYS[2], 'deadline_unix_ms', deadline_unix_ms)
return {OK}
