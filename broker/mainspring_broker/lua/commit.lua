-- commit: everything a worker did in one cycle becomes true at once: results, outcomes, history, its share of the barrier.
-- KEYS[1] info
-- ARGV[1] worker   ARGV[2] incarnation   ARGV[3] batch token   ARGV[4] result_ttl_ms   ARGV[5] timings (JSON)
-- ARGV[6…] for each request, by job and then by seq: tenant, job, seq, op, outcome ("ok" or an error code), digest,
--   payload bytes, result
-- Returns 1 committed, 0 the batch is no longer this worker's: nothing was written.
-- Atomic because a crash in the middle would leave a request done and not done; a zombie's commit is refused whole.
local OUTCOMES_KEPT = 1024

local function commit(keys, args)
    local P = pool_prefix(keys)
    local worker, incarnation, batch, ttl = args[1], args[2], args[3], args[4]
    if redis.call("HGET", P .. "pending", worker) ~= batch then return 0 end
    if redis.call("HGET", P .. "worker:" .. worker, "incarnation") ~= incarnation then return 0 end
    local WIDTH, FIRST = 8, 6
    local jobs, by_key = {}, {}
    for i = FIRST, #args, WIDTH do
        local J = job_key(P, args[i], args[i + 1])
        local job = by_key[J]
        if not job then
            local f = redis.call("HMGET", J, "batch", "done_seq", "taken_seq", "lineage", "worker", "vtime", "backlog_bytes",
                "last_seq")
            if f[1] ~= batch then return 0 end
            job = { J = J, tenant = args[i], name = args[i + 1], first = number(f[2]) + 1, taken = number(f[3]), done = number(f[2]),
                lineage = f[4], worker = f[5], vtime = f[6], bytes = number(f[7]), last = number(f[8]),
                at = {}, tokens = 0, failed = 0, updates = 0 }
            by_key[J] = job
            jobs[#jobs + 1] = job
        end
        if tonumber(args[i + 2]) ~= job.done + 1 then return 0 end -- an outcome is missing or out of order
        job.done = job.done + 1
        job.at[#job.at + 1] = i
    end
    for _, job in ipairs(jobs) do
        if job.done ~= job.taken then return 0 end
    end
    if #jobs ~= number(redis.call("HGET", P .. "cycle", "size:" .. worker)) then return 0 end -- a job is missing

    local now = int(now_ms())
    for _, job in ipairs(jobs) do
        local J, T, ended = job.J, tenant_key(P, job.tenant), false
        for _, i in ipairs(job.at) do
            local seq, op, outcome = args[i + 2], args[i + 3], args[i + 4]
            job.lineage = redis.sha1hex(job.lineage .. args[i + 5] .. outcome)
            job.bytes = job.bytes - tonumber(args[i + 6])
            if outcome ~= "ok" then job.failed = job.failed + 1 end
            if op == "optim_step" and outcome == "ok" then job.updates = job.updates + 1 end
            if op == "end" then ended = true end
            redis.call("XADD", J .. ":outcomes", "MAXLEN", "~", OUTCOMES_KEPT, seq .. "-0", "op", op, "outcome", outcome,
                "lineage", job.lineage)
            redis.call("SET", J .. ":result:" .. seq, args[i + 7], "PX", ttl)
            redis.call("PUBLISH", T .. ":results", job.name .. ":" .. seq)
        end
        redis.call("HSET", J, "done_seq", job.done, "lineage", job.lineage, "batch", "", "active_ms", now,
            "backlog_bytes", int(math.max(job.bytes, 0)))
        if job.failed > 0 then redis.call("HINCRBY", J, "failed", job.failed) end
        if job.updates > 0 then redis.call("HINCRBY", J, "updates", job.updates) end
        if ended then
            redis.call("HSET", J, "state", "ended", "ended_ms", now)
            redis.call("DEL", J .. ":requests", J .. ":queue", J .. ":outcomes")
            redis.call("PEXPIRE", J, ttl)
            redis.call("SREM", T .. ":jobs", job.name)
            redis.call("SREM", P .. "worker:" .. worker .. ":jobs", job.tenant .. "/" .. job.name)
            redis.call("HINCRBY", P .. "worker:" .. worker, "jobs", -1)
        else
            redis.call("LTRIM", J .. ":queue", #job.at, -1)
            redis.call("XTRIM", J .. ":requests", "MINID", (job.done + 1) .. "-0")
            if job.last > job.done then make_ready(P, job.tenant, job.name, job.worker, job.vtime) end
        end
    end
    redis.call("HDEL", P .. "pending", worker)
    redis.call("HSET", P .. "cycle", "worker:" .. worker, args[5])
    if redis.call("EXISTS", P .. "pending") == 0 then close_cycle(P) end
    return 1
end
redis.register_function { function_name = "ms_commit", callback = commit, flags = { "allow-oom" } }
