-- resign: give leadership up, so that a standby need not wait for the lease to run out.
--   KEYS[1] leader    string
--   KEYS[2] server    string  deleted: the process that wrote the newest commits ends, so no leader needs to be waited for
--   ARGV    leadership
--   returns {1} | {0} when it was not the leader
local leadership = ARGV[1]

if redis.call('GET', KEYS[1]) ~= leadership then return {0} end
redis.call('DEL', KEYS[1], KEYS[2])
return {1}
