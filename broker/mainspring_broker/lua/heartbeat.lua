-- heartbeat: a worker says that it lives.
-- KEYS[1] info
-- ARGV[1] worker   ARGV[2] incarnation
-- Returns 1 noted, 0 the name belongs to another process now, or the worker was declared dead: register again.
-- Atomic because a replaced process must not keep its successor's name alive.
local function heartbeat(keys, args)
    local P = pool_prefix(keys)
    if redis.call("HGET", P .. "worker:" .. args[1], "incarnation") ~= args[2] then return 0 end
    redis.call("ZADD", P .. "workers", int(now_ms()), args[1])
    return 1
end
redis.register_function { function_name = "ms_heartbeat", callback = heartbeat, flags = { "allow-oom" } }
