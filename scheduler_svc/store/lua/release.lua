-- release: take requests back from their workers. The lease epoch stays: what the worker still reports counts until
-- the next lease raises it.
--   KEYS[1] leader   string
--   KEYS[2…] request hash, one per entry
--   ARGV    leadership, then per entry: lease_epoch, deaths, death_round (of workers that it was leased to)
--   returns per entry OK, ALREADY (this lease was released; perhaps leased anew or ended since), STALE (another epoch
--           is on the record) or GONE; or {'fenced'}
local leadership = ARGV[1]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local answers = {}
for k = 2, #KEYS do
    local a = 2 + (k - 2) * 3
    local request, lease_epoch = KEYS[k], ARGV[a]
    local was = redis.call('HMGET', request, 'state', 'lease_epoch', 'released_epoch')
    local answer = STALE
    if not was[1] then
        answer = GONE
    elseif tonumber(lease_epoch) <= tonumber(was[3]) then
        answer = ALREADY
    elseif was[1] == 'ended' then
        answer = GONE
    elseif was[2] == lease_epoch and was[1] == 'leased' then
        redis.call('HSET', request, 'state', 'queued', 'worker', '', 'released_epoch', lease_epoch,
            'deaths', ARGV[a + 1], 'death_round', ARGV[a + 2])
        answer = OK
    end
    answers[#answers + 1] = answer
end
return answers
