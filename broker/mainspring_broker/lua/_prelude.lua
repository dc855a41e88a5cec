-- Shared by all functions of the library; each file is wrapped in `do … end` behind this one.
-- KEYS[1] routes the call to the pool's slot, and the pool's other keys are derived from it. It is ms:{pool}:info, or for
-- what a tenant's client calls a key of that tenant: a call needs write permission for each key that it declares.

local MAX_PREFIX = 256 -- requests of one job looked at per cycle

local function now_ms()
    local time = redis.call("TIME")
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function pool_prefix(keys) -- "ms:{pool}:"
    return string.match(keys[1], "^%a+:%b{}:")
end

local function tenant_key(P, tenant)
    return P .. "t:" .. tenant
end

local function job_key(P, tenant, job)
    return P .. "t:" .. tenant .. ":job:" .. job
end

-- A list that holds at most one token wakes whoever blocks on it; more tokens would only wake it for nothing.
local function ring(key)
    if redis.call("LLEN", key) == 0 then redis.call("RPUSH", key, "1") end
end

local function number(value)
    return tonumber(value) or 0
end

-- Large integers would become 1.5e+12 through Lua's tostring.
local function int(value)
    return string.format("%.0f", value)
end

local function exact(value) -- a virtual time, so that it is the same number when it is read again
    return string.format("%.17g", value)
end

local function hash(key)
    local flat, fields = redis.call("HGETALL", key), {}
    for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
    return fields
end

-- Put a job whose head may run into its ready set.
local function make_ready(P, tenant, job, worker, vtime)
    if worker == "" then worker = "-" end
    redis.call("ZADD", tenant_key(P, tenant) .. ":ready:" .. worker, vtime, job)
end

-- The barrier is complete: write the cycle's history entry and wake the clock.
local function close_cycle(P)
    local entry, timings = hash(P .. "cycle"), {}
    for field, value in pairs(entry) do
        local worker = string.match(field, "^worker:(.+)$")
        if worker then timings[#timings + 1] = cjson.encode(worker) .. ":" .. value end
    end
    table.sort(timings)
    local now = now_ms()
    redis.call("XADD", P .. "cycles", "MAXLEN", "~", entry.keep, entry.cycle .. "-0",
        "started_ms", entry.started_ms, "ms", int(now - entry.started_ms), "jobs", entry.jobs,
        "requests", entry.requests, "tokens", entry.tokens, "plan", entry.plan,
        "workers", "{" .. table.concat(timings, ",") .. "}")
    redis.call("DEL", P .. "cycle")
    redis.call("HSET", P .. "clock", "state", "boundary", "ended_ms", int(now))
    ring(P .. "bell")
end

-- Hand back what a worker had in hand: its unfinished batch becomes eligible again, untouched and in order.
local function hand_back(P, worker)
    local batch = redis.call("HGET", P .. "pending", worker)
    if not batch then return 0 end
    local count = 0
    for _, name in ipairs(redis.call("SMEMBERS", P .. "worker:" .. worker .. ":jobs")) do
        local tenant, job = string.match(name, "^([^/]+)/(.+)$")
        local J = job_key(P, tenant, job)
        local fields = redis.call("HMGET", J, "batch", "vtime", "done_seq")
        if fields[1] == batch then
            redis.call("HSET", J, "batch", "", "taken_seq", fields[3])
            make_ready(P, tenant, job, worker, fields[2])
            count = count + 1
        end
    end
    redis.call("HDEL", P .. "pending", worker)
    redis.call("HSET", P .. "cycle", "worker:" .. worker, '{"lost":true}')
    if redis.call("EXISTS", P .. "pending") == 0 then close_cycle(P) end
    return count
end
