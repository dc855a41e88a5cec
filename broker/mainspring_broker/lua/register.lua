-- register: a worker process takes its name, or takes it over from an earlier process of that name.
-- KEYS[1] info
-- ARGV[1] worker   ARGV[2] incarnation (random)   ARGV[3] slots   ARGV[4] base_model   ARGV[5] base_model_path
-- ARGV[6] vocab_size   ARGV[7] max_length   ARGV[8…] further fields of the worker's hash, name and value in turn
-- Returns {status, value}: {"ok", jobs handed back from the earlier process}; {"other_base_model", the pool's own}.
-- Atomic because the earlier process's batch must be handed back before the new one can be given any.
local function register(keys, args)
    local P = pool_prefix(keys)
    local worker, incarnation = args[1], args[2]
    local W = P .. "worker:" .. worker
    local model = redis.call("HGET", keys[1], "base_model")
    if model and model ~= args[4] then return { "other_base_model", model } end
    redis.call("HSET", keys[1], "base_model", args[4], "base_model_path", args[5], "vocab_size", args[6],
        "max_length", args[7])
    local back, now = hand_back(P, worker), int(now_ms())
    redis.call("DEL", W .. ":batches")
    redis.call("HSET", W, "incarnation", incarnation, "state", "ready", "slots", args[3], "registered_ms", now,
        "jobs", redis.call("SCARD", W .. ":jobs"))
    for i = 8, #args - 1, 2 do redis.call("HSET", W, args[i], args[i + 1]) end
    redis.call("ZADD", P .. "workers", now, worker)
    ring(P .. "bell")
    return { "ok", back }
end
redis.register_function { function_name = "ms_register", callback = register, flags = { "allow-oom" } }
