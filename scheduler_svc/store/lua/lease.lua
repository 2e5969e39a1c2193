-- lease: give requests to workers under the next lease epoch. Taking one from another worker (stealing) is the same
-- transition: the raised epoch makes whatever the other still reports stale.
--   KEYS[1] leader   string
--   KEYS[2…] request hash, one per entry
--   ARGV    leadership, pair (fingerprint of the model pair of these workers), then per entry: worker, lease_epoch before,
--           lease_epoch
--   returns per entry OK, ALREADY (this epoch went to this worker), STALE (the record is at another epoch) or GONE;
--           or {'fenced'}
local leadership, pair = ARGV[1], ARGV[2]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local answers = {}
for k = 2, #KEYS do
    local a = 3 + (k - 2) * 3
    local request, worker, before, lease_epoch = KEYS[k], ARGV[a], ARGV[a + 1], ARGV[a + 2]
    local was = redis.call('HMGET', request, 'state', 'lease_epoch', 'leased_to')
    local answer = STALE
    if not was[1] then
        answer = GONE
    elseif was[2] == lease_epoch and was[3] == worker then
        answer = ALREADY
    elseif was[1] == 'ended' then
        answer = GONE
    elseif was[2] == before then
        redis.call('HSET', request, 'state', 'leased', 'lease_epoch', lease_epoch, 'worker', worker, 'leased_to', worker,
            'pair', pair)
        answer = OK
    end
    answers[#answers + 1] = answer
end
return answers
