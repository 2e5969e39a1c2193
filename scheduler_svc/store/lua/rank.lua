-- rank: move requests to another place in the queue.
--   KEYS[1..36] the queue (see _common), then per entry the request hash
--   ARGV    leadership, then per entry: id, level, score
--   returns per entry OK, ALREADY (it stands there) or GONE; or {'fenced'}
local leadership = ARGV[1]
if redis.call('GET', KEYS[1]) ~= leadership then return {'fenced'} end

local answers, k = {}, AFTER_QUEUE
for a = 2, #ARGV, 3 do
    local request, id, level, score = KEYS[k], ARGV[a], ARGV[a + 1], ARGV[a + 2]
    local was = redis.call('HMGET', request, 'state', 'level', 'score')
    local answer = OK
    if not was[1] or was[1] == 'ended' then
        answer = GONE
    elseif was[2] == level and was[3] == score then
        answer = ALREADY
    else
        place(id, was[2], level, score)
        redis.call('HSET', request, 'level', level, 'score', score)
    end
    answers[#answers + 1] = answer
    k = k + 1
end
return answers
