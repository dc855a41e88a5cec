-- requeue: take a worker out of the pool: its unfinished batch becomes eligible again and its jobs are placed anew.
-- KEYS[1] info
-- ARGV[1] worker   ARGV[2] incarnation ("" whichever)   ARGV[3] lease token of the clock ("" a worker that leaves by itself)
-- ARGV[4] dead_after_ms (0 do not look at the heartbeat)
-- Returns {status, jobs}: {"removed", jobs moved}; {"alive", 0} it has a heartbeat after all; {"not_leader", 0}; {"replaced", 0}.
-- Atomic because a request must never be in two hands: after this the old process's commit is refused whole.
local function requeue(keys, args)
    local P = pool_prefix(keys)
    local worker, incarnation, lease, dead_after = args[1], args[2], args[3], tonumber(args[4])
    local W = P .. "worker:" .. worker
    if lease ~= "" and redis.call("GET", P .. "lease") ~= lease then return { "not_leader", 0 } end
    if incarnation ~= "" and redis.call("HGET", W, "incarnation") ~= incarnation then return { "replaced", 0 } end
    local beat = number(redis.call("ZSCORE", P .. "workers", worker))
    if dead_after > 0 and now_ms() - beat < dead_after then return { "alive", 0 } end
    hand_back(P, worker)
    local names = redis.call("SMEMBERS", W .. ":jobs")
    for _, name in ipairs(names) do
        local tenant, job = string.match(name, "^([^/]+)/(.+)$")
        local T = tenant_key(P, tenant)
        redis.call("HSET", job_key(P, tenant, job), "worker", "", "vtime", 0) -- virtual times are each worker's own
        if redis.call("ZREM", T .. ":ready:" .. worker, job) == 1 then make_ready(P, tenant, job, "", 0) end
    end
    redis.call("DEL", W, W .. ":jobs", W .. ":batches", W .. ":fair")
    redis.call("ZREM", P .. "workers", worker)
    ring(P .. "bell")
    return { "removed", #names }
end
redis.register_function { function_name = "ms_requeue", callback = requeue, flags = { "allow-oom" } }
