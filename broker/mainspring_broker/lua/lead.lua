-- lead: take or keep the lease of the pool's clock, or stand by; either way a sign of life.
-- KEYS[1] info
-- ARGV[1] token (random, one per clock process)   ARGV[2] lease_ms   ARGV[3] name of the clock, for people
-- Returns 1 leading, 0 another clock leads.
-- Atomic because look and take must not be divided.
local function lead(keys, args)
    local P, now = pool_prefix(keys), now_ms()
    local silent_ms = 2 * args[2] -- a clock without a sign of life for so long is off the list
    redis.call("ZADD", P .. "clocks", int(now), args[3])
    redis.call("ZREMRANGEBYSCORE", P .. "clocks", "-inf", int(now - silent_ms))
    redis.call("PEXPIRE", P .. "clocks", int(silent_ms))
    local holder = redis.call("GET", P .. "lease")
    if holder and holder ~= args[1] then return 0 end
    redis.call("SET", P .. "lease", args[1], "PX", args[2])
    if not holder then redis.call("HSET", P .. "clock", "leader", args[3], "leads_since_ms", int(now)) end
    return 1
end
redis.register_function { function_name = "ms_lead", callback = lead, flags = { "allow-oom" } }
