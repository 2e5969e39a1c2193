-- clear: the requests' own keys hold all that the log has: its entries go, and with them the outputs of requests that ended.
--   KEYS[1] leader   string
--   KEYS[2] log      stream
--   ARGV    leadership
--   returns {} | {'fenced'}
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end
redis.call('XTRIM', KEYS[2], 'MAXLEN', 0)
return {}
