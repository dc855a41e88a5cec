-- create_job: make a job's record, before its first request.
-- KEYS[1] job hash
-- ARGV[1] tenant   ARGV[2] job   ARGV[3] writer   ARGV[4] base_model   ARGV[5] rank   ARGV[6] spec (JSON, for people)
-- Returns {status, last_seq, chain, done_seq}: "created"; "have" (the same writer repeats itself); "exists" (another writer's);
--   "unknown_tenant"; "no_worker" (no worker has registered yet); "unknown_base_model" with the pool's own name.
-- Errors: "INVALID …" for a name that could be taken for another job's key or folder, or a key of another job.
-- Atomic because two clients must not both believe that they made the job.
local function create_job(keys, args)
    local P = pool_prefix(keys)
    local J = keys[1]
    local tenant, job, writer, base_model = args[1], args[2], args[3], args[4]
    if #job > 100 or not string.match(job, "^%w[%w_.-]*$") or J ~= job_key(P, tenant, job) then
        return redis.error_reply("INVALID job name or key")
    end
    if redis.call("HEXISTS", P .. "tenants", tenant) == 0 then return { "unknown_tenant", 0, "", 0 } end
    local present = redis.call("HMGET", J, "writer", "last_seq", "chain", "done_seq")
    if present[1] then
        local status = present[1] == writer and "have" or "exists"
        return { status, number(present[2]), present[3], number(present[4]) }
    end
    local model = redis.call("HMGET", P .. "info", "base_model", "base_model_path")
    if not model[1] then return { "no_worker", 0, "", 0 } end
    if base_model ~= model[1] and base_model ~= model[2] then return { "unknown_base_model", 0, model[1], 0 } end
    -- Writer ids are random, so no two jobs ever begin with the same chain.
    local chain = redis.sha1hex("job " .. tenant .. " " .. job .. " " .. writer)
    redis.call("HSET", J, "state", "open", "tenant", tenant, "base_model", model[1], "rank", args[5], "spec", args[6],
        "writer", writer, "created_ms", int(now_ms()), "last_seq", 0, "taken_seq", 0, "done_seq", 0,
        "chain", chain, "lineage", chain, "worker", "", "batch", "", "vtime", 0, "weight", 1,
        "backlog_bytes", 0, "tokens", 0, "failed", 0, "updates", 0)
    redis.call("SADD", tenant_key(P, tenant) .. ":jobs", job)
    return { "created", 0, chain, 0 }
end
redis.register_function("ms_create_job", create_job)
