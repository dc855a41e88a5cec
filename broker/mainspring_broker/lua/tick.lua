-- tick: close the boundary. Place new jobs, select each job's eligible prefix by fair share, hand out one batch a worker.
-- KEYS[1] info
-- ARGV[1] lease token   ARGV[2] lease_ms   ARGV[3] token budget per worker   ARGV[4] dead_after_ms
-- ARGV[5] history length (cycles kept)   ARGV[6] random token, from which the batch tokens are derived
-- Returns {status, cycle, requests, tokens, jobs, unplaced}: "started"; "running" (a worker has not committed yet); "idle"
--   (nothing is eligible); "not_leader".
-- Atomic because a request is either in this cycle or behind it, whatever arrives meanwhile.
-- Costs what it selects: tenants × workers look-ups, then a few commands for each job taken; jobs that wait cost nothing.
-- The rules are those of mainspring_clock/policy.py, and the same cases run against both.

local PLACE_LIMIT = 256 -- jobs placed in one tick
local SKIP_LIMIT = 32 -- jobs passed over, per worker, because their head does not fit into what is left
local MIN_WEIGHT = 1e-6
local STAGE = { init = 1, load_state = 1, forward = 2, forward_backward = 2, optim_step = 3,
    save_state = 4, save_weights = 4, ["end"] = 5 }
local ONCE = { [1] = true, [3] = true, [5] = true }

-- The longest prefix (init|load_state)? (forward|forward_backward)* optim_step? (save)* end? of the queue, as far as the
-- budget goes. What alone exceeds the budget runs when the worker is otherwise empty.
local function prefix(headers, left, empty)
    local taken, tokens, stage = {}, 0, 1
    for _, header in ipairs(headers) do
        local seq, op, count, mark = string.match(header, "^(%d+) (%S+) (%d+) ?(%a*)$")
        if not seq then break end -- not written by submit
        local at = STAGE[op] or 2 -- an unknown operation runs alone in order, and fails
        if at < stage or (ONCE[at] and stage == at and #taken > 0) then break end
        count = tonumber(count)
        local fits = tokens + count <= left or count == 0 or (empty and tokens == 0)
        if not fits then break end
        taken[#taken + 1] = { tonumber(seq), op, count, mark }
        tokens = tokens + count
        stage = at
    end
    return taken, tokens
end

local function live_workers(P, dead_after_ms)
    local live = {}
    local names = redis.call("ZRANGEBYSCORE", P .. "workers", now_ms() - dead_after_ms, "+inf")
    table.sort(names)
    for _, name in ipairs(names) do
        local f = redis.call("HMGET", P .. "worker:" .. name, "state", "slots", "jobs", "load")
        if f[1] == "ready" then
            live[#live + 1] = { name = name, slots = number(f[2]), jobs = number(f[3]), load = number(f[4]) }
        end
    end
    return live
end

local function lightest(workers)
    local best = nil
    for _, w in ipairs(workers) do
        if w.jobs < w.slots and (not best or w.jobs < best.jobs or (w.jobs == best.jobs and w.load < best.load)) then
            best = w
        end
    end
    return best
end

-- Tenants take turns, so that one with many new jobs does not take every free slot.
local function place(P, tenants, workers)
    local waiting, unplaced, budget = {}, 0, PLACE_LIMIT
    for _, t in ipairs(tenants) do
        local jobs = redis.call("ZCARD", tenant_key(P, t.name) .. ":ready:-")
        if jobs > 0 then waiting[#waiting + 1] = { name = t.name, jobs = jobs } end
        unplaced = unplaced + jobs
    end
    while #waiting > 0 do
        local still = {}
        for _, t in ipairs(waiting) do
            local worker = budget > 0 and lightest(workers)
            if not worker then return unplaced end
            local job = redis.call("ZPOPMIN", tenant_key(P, t.name) .. ":ready:-")[1]
            redis.call("HSET", job_key(P, t.name, job), "worker", worker.name)
            make_ready(P, t.name, job, worker.name, 0)
            redis.call("SADD", P .. "worker:" .. worker.name .. ":jobs", t.name .. "/" .. job)
            redis.call("HINCRBY", P .. "worker:" .. worker.name, "jobs", 1)
            worker.jobs = worker.jobs + 1
            t.jobs, unplaced, budget = t.jobs - 1, unplaced - 1, budget - 1
            if t.jobs > 0 then still[#still + 1] = t end
        end
        waiting = still
    end
    return unplaced
end

-- The tenants that have something to run on this worker.
local function sharers(P, worker, tenants, fair)
    local shares = {}
    for _, t in ipairs(tenants) do
        local ready = tenant_key(P, t.name) .. ":ready:" .. worker
        local waiting = redis.call("ZCARD", ready)
        if waiting > 0 then
            shares[#shares + 1] = { tenant = t.name, weight = t.weight, ready = ready, waiting = waiting, skipped = 0,
                vtime = math.max(number(fair["tenant:" .. t.name]), number(fair.present)),
                present = number(fair["jobs:" .. t.name]) }
        end
    end
    return shares
end

-- The job that did not fit last time, if it still waits.
local function passed_over(shares, passed)
    for _, s in ipairs(shares) do
        local job = passed and string.sub(passed, #s.tenant + 2)
        local vtime = job and s.tenant .. "/" .. job == passed and redis.call("ZSCORE", s.ready, job)
        if vtime then return s, job, tonumber(vtime) end
    end
end

local function furthest_behind(shares)
    local best = nil
    for _, s in ipairs(shares) do
        if s.waiting > s.skipped and (not best or s.vtime < best.vtime) then best = s end
    end
    if not best then return nil end
    local head = redis.call("ZRANGE", best.ready, best.skipped, best.skipped, "WITHSCORES")
    return best, head[1], tonumber(head[2])
end

-- One worker's batch: again and again the tenant that is furthest behind, and of it the job that is furthest behind.
local function select_batch(P, worker, tenants, budget, batch)
    local F = P .. "worker:" .. worker .. ":fair"
    local fair = hash(F)
    local shares = sharers(P, worker, tenants, fair)
    local jobs, used, requests, skips, lowest, passed = {}, 0, 0, 0, nil, nil
    local share, job, vtime = passed_over(shares, fair.passed)
    while skips < SKIP_LIMIT and (used < budget or #jobs == 0) do
        if not share then share, job, vtime = furthest_behind(shares) end
        if not share then break end
        local J = job_key(P, share.tenant, job)
        local taken, tokens = prefix(redis.call("LRANGE", J .. ":queue", 0, MAX_PREFIX - 1), budget - used, used == 0)
        if #taken == 0 and used == 0 then -- its queue cannot be read: out of the way, or it would block its neighbours
            redis.call("ZREM", share.ready, job)
            share.waiting = share.waiting - 1
        else
            local start = math.max(vtime, share.present)
            lowest = math.min(lowest or share.vtime, share.vtime)
            share.lowest = math.min(share.lowest or start, start)
            if #taken == 0 then
                share.skipped, skips = share.skipped + 1, skips + 1
                passed = passed or share.tenant .. "/" .. job
            else
                local f = redis.call("HMGET", J, "chain", "lineage", "weight")
                local cost = math.max(tokens, 1)
                redis.call("ZREM", share.ready, job)
                redis.call("HSET", J, "batch", batch, "taken_seq", taken[#taken][1],
                    "vtime", exact(start + cost / math.max(number(f[3]), MIN_WEIGHT)))
                share.waiting, share.vtime, share.served = share.waiting - 1, share.vtime + cost / share.weight, true
                used, requests = used + tokens, requests + #taken
                jobs[#jobs + 1] = { tenant = share.tenant, job = job, chain = f[1], lineage = f[2], requests = taken,
                    tokens = tokens }
            end
        end
        share = nil
    end
    if #jobs == 0 then return jobs, 0, 0 end
    redis.call("HSET", F, "present", exact(math.max(number(fair.present), lowest)))
    for _, s in ipairs(shares) do
        if s.served then redis.call("HSET", F, "tenant:" .. s.tenant, exact(s.vtime)) end
        if s.lowest then redis.call("HSET", F, "jobs:" .. s.tenant, exact(math.max(s.present, s.lowest))) end
    end
    if passed then redis.call("HSET", F, "passed", passed) else redis.call("HDEL", F, "passed") end
    return jobs, used, requests
end

local function summary(worker, jobs) -- for the history: who did what, without seqs
    local rows = {}
    for _, j in ipairs(jobs) do
        local ops = {}
        for _, r in ipairs(j.requests) do ops[#ops + 1] = r[2] end
        rows[#rows + 1] = { j.tenant, j.job, worker, table.concat(ops, " "), j.tokens }
    end
    return rows
end

local function tick(keys, args)
    local P = pool_prefix(keys)
    local token, budget = args[1], tonumber(args[3])
    local cycle = number(redis.call("HGET", P .. "clock", "cycle"))
    if redis.call("GET", P .. "lease") ~= token then return { "not_leader", cycle, 0, 0, 0, 0 } end
    redis.call("PEXPIRE", P .. "lease", args[2])
    if redis.call("EXISTS", P .. "pending") == 1 then return { "running", cycle, 0, 0, 0, 0 } end

    local tenants = {}
    for name, weight in pairs(hash(P .. "tenants")) do
        tenants[#tenants + 1] = { name = name, weight = math.max(number(weight), MIN_WEIGHT) }
    end
    table.sort(tenants, function(a, b) return a.name < b.name end)

    local workers = live_workers(P, tonumber(args[4]))
    local unplaced = place(P, tenants, workers)
    local started, plan, requests, tokens, job_count = int(now_ms()), {}, 0, 0, 0
    for _, worker in ipairs(workers) do
        local batch = redis.sha1hex(args[6] .. worker.name)
        local jobs, used, count = select_batch(P, worker.name, tenants, budget, batch)
        if #jobs > 0 then
            local W = P .. "worker:" .. worker.name
            redis.call("HSET", P .. "pending", worker.name, batch)
            redis.call("HSET", P .. "cycle", "size:" .. worker.name, #jobs)
            redis.call("XADD", W .. ":batches", "MAXLEN", "=", 16, "*", "batch", batch, "cycle", int(cycle + 1),
                "started_ms", started, "jobs", cjson.encode(jobs))
            redis.call("HSET", W, "load", exact(worker.load * 0.9 + used))
            for _, row in ipairs(summary(worker.name, jobs)) do plan[#plan + 1] = row end
            requests, tokens, job_count = requests + count, tokens + used, job_count + #jobs
        end
    end
    if job_count == 0 then
        if redis.call("HGET", P .. "clock", "state") ~= "idle" then redis.call("HSET", P .. "clock", "state", "idle") end
        return { "idle", cycle, 0, 0, 0, unplaced }
    end
    cycle = cycle + 1
    redis.call("HSET", P .. "clock", "cycle", int(cycle), "state", "running", "started_ms", started)
    redis.call("HSET", P .. "cycle", "cycle", int(cycle), "started_ms", started, "jobs", job_count, "requests", requests,
        "tokens", int(tokens), "keep", args[5], "plan", cjson.encode(plan))
    return { "started", cycle, requests, tokens, job_count, unplaced }
end
redis.register_function { function_name = "ms_tick", callback = tick, flags = { "allow-oom" } }
