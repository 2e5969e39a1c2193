-- prompt_logprobs: keep the log probabilities of prompts, before the first tokens of their requests are committed.
--   KEYS[1] leader   string
--   then per entry
--     request      hash
--     payload      hash  field `prompt_logprobs`
--   ARGV    leadership, then per entry
--     lease_epoch, log probabilities
--   returns per entry OK, STALE (leased under another epoch) or GONE (missing, or ended); or {'fenced'}
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end

local answers, k = {}, 2
for a = 2, #ARGV, 2 do
    local was = redis.call('HMGET', KEYS[k], 'state', 'lease_epoch')
    local answer = OK
    if not was[1] or was[1] == 'ended' then
        answer = GONE
    elseif was[2] ~= ARGV[a] then
        answer = STALE
    else
        redis.call('HSET', KEYS[k + 1], 'prompt_logprobs', ARGV[a + 1])
    end
    answers[#answers + 1] = answer
    k = k + 2
end
return answers
