-- withdraw: remove requests whose submission was refused because the record did not answer, and that it holds all the same. Their
-- clients were told to submit again, so the idempotency key is free for that. No worker has ever had such a request.
--   KEYS[1..4] the queue (see _common), then per entry
--     request      hash
--     tokens       string
--     payload      hash
--     idempotency  string; the request's key again when there is none
--   ARGV    leadership, then per entry
--     id, sequence
--   returns per entry OK or GONE (missing, ended, or submitted again since: with another sequence); or {'fenced'}
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end

local answers, k = {}, AFTER_QUEUE
for a = 2, #ARGV, 2 do
    local id, request, idempotency = ARGV[a], KEYS[k], KEYS[k + 3]
    local now, answer = redis.call('HMGET', request, 'state', 'sequence', 'tenant', 'prompt_tokens'), GONE
    if now[1] and now[1] ~= 'ended' and now[2] == ARGV[a + 1] then
        if has_key(id, request, idempotency) then redis.call('DEL', idempotency) end
        leave_queue(id, now[3], now[4])
        redis.call('DEL', request, KEYS[k + 1], KEYS[k + 2])
        answer = OK
    end
    answers[#answers + 1] = answer
    k = k + 4
end
return answers
