-- withdraw: remove requests whose submission was refused because the record did not answer, and that it holds all the same. Their
-- clients were told to submit again, so the idempotency key is free for that. No worker has ever had such a request.
--   KEYS[1..36] the queue (see _common), then per entry
--     request      hash
--     tokens       string
--     payload      hash
--     idempotency  string; the request's key again when there is none
--   ARGV    leadership, then the ids
--   returns per entry OK or GONE (missing, or ended); or {'fenced'}
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'fenced'} end

local answers, k = {}, AFTER_QUEUE
for a = 2, #ARGV do
    local id, request, idempotency = ARGV[a], KEYS[k], KEYS[k + 3]
    local state, answer = redis.call('HGET', request, 'state'), GONE
    if state and state ~= 'ended' then
        if has_key(id, request, idempotency) then redis.call('DEL', idempotency) end
        leave_queue(id, request)
        redis.call('DEL', request, KEYS[k + 1], KEYS[k + 2])
        answer = OK
    end
    answers[#answers + 1] = answer
    k = k + 4
end
return answers
