-- resign: a clock leaves: it gives the lease back, if it has it, so that a standby need not wait for its end.
-- KEYS[1] info
-- ARGV[1] token   ARGV[2] name of the clock
-- Returns 1 given back, 0 it was not held.
-- Atomic because another clock's lease must not be deleted.
local function resign(keys, args)
    local P = pool_prefix(keys)
    redis.call("ZREM", P .. "clocks", args[2])
    if redis.call("GET", P .. "lease") ~= args[1] then return 0 end
    redis.call("DEL", P .. "lease")
    ring(P .. "bell")
    return 1
end
redis.register_function { function_name = "ms_resign", callback = resign, flags = { "allow-oom" } }
