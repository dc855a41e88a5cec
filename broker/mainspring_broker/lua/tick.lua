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
local STAGE = { init = 1, load_state = 1, forward = 2, forward_backward = 2, optim_step = 3,
    save_state = 4, save_weights = 4, ["end"] = 5 }
local ONCE = { [1] = true, [3] = true, [5] = true }

-- The longest prefix (init|load_state)? (forward|forward_backward)* optim_step? (save)* end? of the queue, as far as the
-- budget goes. What alone exceeds the budget runs when the worker is otherwise empty.
local function prefix(headers, left, empty)
    local taken, tokens, stage = {}, 0, 1
    for _, header in ipairs(headers) do
        local seq, op, count, mark = string.match(header, "^(%d+) (%S+) (%d+) ?(%a*)$")
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

local function place(P, tenants, workers)
    local unplaced, budget = 0, PLACE_LIMIT
    for _, tenant in ipairs(tenants) do
        local T = tenant_key(P, tenant)
        local waiting = T .. ":ready:-"
        while redis.call("EXISTS", waiting) == 1 do
            local worker = budget > 0 and lightest(workers)
            if not worker then
                unplaced = unplaced + redis.call("ZCARD", waiting)
                break
            end
            local popped = redis.call("ZPOPMIN", waiting)
            redis.call("HSET", job_key(P, tenant, popped[1]), "worker", worker.name)
            redis.call("ZADD", T .. ":ready:" .. worker.name, popped[2], popped[1])
            redis.call("SADD", P .. "worker:" .. worker.name .. ":jobs", tenant .. "/" .. popped[1])
            redis.call("HINCRBY", P .. "worker:" .. worker.name, "jobs", 1)
            worker.jobs = worker.jobs + 1
            budget = budget - 1
        end
    end
    return unplaced
end

-- One worker's batch: again and again the tenant that is furthest behind, and of it the job that is furthest behind.
local function select_batch(P, worker, shares, budget, batch)
    local jobs, used, requests, skipped, lowest = {}, 0, 0, 0, nil
    local cursors = {} -- tenant -> jobs of its ready set that were passed over
    while skipped < SKIP_LIMIT and (used < budget or #jobs == 0) do
        local share = nil
        for _, s in ipairs(shares) do
            if not cursors[s.name] then
                cursors[s.name] = 0
                s.ready = redis.call("ZCARD", tenant_key(P, s.name) .. ":ready:" .. worker.name)
            end
            if s.ready > cursors[s.name] and (not share or s.vtime < share.vtime) then share = s end
        end
        if not share then break end
        local T = tenant_key(P, share.name)
        local ready = T .. ":ready:" .. worker.name
        local head = redis.call("ZRANGE", ready, cursors[share.name], cursors[share.name], "WITHSCORES")
        local job, vtime = head[1], tonumber(head[2])
        local J = T .. ":job:" .. job
        local taken, tokens = prefix(redis.call("LRANGE", J .. ":queue", 0, MAX_PREFIX - 1), budget - used, used == 0)
        if #taken == 0 then
            cursors[share.name] = cursors[share.name] + 1
            skipped = skipped + 1
        else
            local f = redis.call("HMGET", J, "chain", "lineage", "weight")
            local cost = math.max(tokens, 1)
            redis.call("ZREM", ready, job)
            share.ready = share.ready - 1
            redis.call("HSET", J, "batch", batch, "taken_seq", taken[#taken][1],
                "vtime", string.format("%.17g", vtime + cost / math.max(number(f[3]), 1e-6)))
            redis.call("HSET", T, "vtime", string.format("%.17g", vtime))
            if not lowest or share.vtime < lowest then lowest = share.vtime end
            share.vtime = share.vtime + cost / share.weight
            share.changed = true
            used, requests = used + tokens, requests + #taken
            jobs[#jobs + 1] = { tenant = share.name, job = job, chain = f[1], lineage = f[2], requests = taken, tokens = tokens }
        end
    end
    return jobs, used, requests, lowest
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

    local present = number(redis.call("HGET", P .. "clock", "vtime"))
    local names, shares = {}, {}
    local weights = redis.call("HGETALL", P .. "tenants")
    for i = 1, #weights, 2 do
        names[#names + 1] = weights[i]
    end
    table.sort(names)
    local weight_of = {}
    for i = 1, #weights, 2 do weight_of[weights[i]] = math.max(number(weights[i + 1]), 1e-6) end
    for _, name in ipairs(names) do
        local vtime = math.max(number(redis.call("ZSCORE", P .. "fair", name)), present)
        shares[#shares + 1] = { name = name, weight = weight_of[name], vtime = vtime }
    end

    local workers = live_workers(P, tonumber(args[4]))
    local unplaced = place(P, names, workers)
    local started, plan, requests, tokens, job_count, lowest = int(now_ms()), {}, 0, 0, 0, nil
    for _, worker in ipairs(workers) do
        local batch = redis.sha1hex(args[6] .. worker.name)
        local jobs, used, count, low = select_batch(P, worker, shares, budget, batch)
        if #jobs > 0 then
            local W = P .. "worker:" .. worker.name
            redis.call("HSET", P .. "pending", worker.name, batch)
            redis.call("XADD", W .. ":batches", "MAXLEN", "=", 16, "*", "batch", batch, "cycle", int(cycle + 1),
                "started_ms", started, "jobs", cjson.encode(jobs))
            redis.call("HSET", W, "load", string.format("%.17g", worker.load * 0.9 + used))
            for _, row in ipairs(summary(worker.name, jobs)) do plan[#plan + 1] = row end
            requests, tokens, job_count = requests + count, tokens + used, job_count + #jobs
            if low and (not lowest or low < lowest) then lowest = low end
        end
    end
    if job_count == 0 then
        if redis.call("HGET", P .. "clock", "state") ~= "idle" then redis.call("HSET", P .. "clock", "state", "idle") end
        return { "idle", cycle, 0, 0, 0, unplaced }
    end
    for _, s in ipairs(shares) do
        if s.changed then redis.call("ZADD", P .. "fair", string.format("%.17g", s.vtime), s.name) end
    end
    cycle = cycle + 1
    redis.call("HSET", P .. "clock", "cycle", int(cycle), "state", "running", "started_ms", started,
        "vtime", string.format("%.17g", math.max(present, lowest)))
    redis.call("HSET", P .. "cycle", "cycle", int(cycle), "started_ms", started, "jobs", job_count, "requests", requests,
        "tokens", int(tokens), "keep", args[5], "plan", cjson.encode(plan))
    return { "started", cycle, requests, tokens, job_count, unplaced }
end
redis.register_function { function_name = "ms_tick", callback = tick, flags = { "allow-oom" } }
