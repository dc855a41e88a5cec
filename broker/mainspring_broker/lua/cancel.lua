-- cancel: mark one request that has not started, so that it is skipped when its turn comes.
-- KEYS[1] job hash
-- ARGV[1] writer   ARGV[2] seq
-- Returns 1 marked (its result will be RequestCancelled), 0 too late or never accepted.
-- Atomic because the request must not start between the look and the mark.
-- The request keeps its place and its seq, and an update that lost a forward_backward fails as after any failed one.
local function cancel(keys, args)
    local J, seq = keys[1], tonumber(args[2])
    local f = redis.call("HMGET", J, "writer", "last_seq", "taken_seq", "done_seq")
    if f[1] ~= args[1] or seq > number(f[2]) or seq <= number(f[3]) then return 0 end
    local index = seq - number(f[4]) - 1 -- the queue holds done_seq + 1 … last_seq
    local header = redis.call("LINDEX", J .. ":queue", index)
    if not header then return 0 end
    local op = string.match(header, "^%d+ (%S+)")
    if op == "end" then return 0 end -- the end of a job is not taken back
    redis.call("LSET", J .. ":queue", index, seq .. " " .. op .. " 0 cancelled")
    return 1
end
redis.register_function { function_name = "ms_cancel", callback = cancel, flags = { "allow-oom" } }
