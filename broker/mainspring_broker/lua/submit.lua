-- submit: append one request to its job's stream.
-- KEYS[1] job hash
-- ARGV[1] tenant   ARGV[2] job   ARGV[3] writer   ARGV[4] seq   ARGV[5] the sender's chain before this request
-- ARGV[6] op   ARGV[7] tokens   ARGV[8] digest of op and payload   ARGV[9] payload
-- Returns {status, last_seq, chain, done_seq}: "accepted"; "have" (this very request was accepted before); "gap" (send again from
--   last_seq + 1); "full" (too many unfinished requests or bytes: wait); "too_large"; "conflict" (this seq was another request);
--   "diverged" (the sender's history is not the job's); "fenced" (another writer owns the job); "ended"; "unknown".
-- Errors: "INVALID …" for a key of another job, or a seq, op, tokens or digest that nobody could read or that the history
--   would carry on for long; the typed call never sends one.
-- Atomic because the check of seq and chain and the append must see the same job; two senders may race.
local function whole(text, digits)
    return #text <= digits and string.match(text, "^%d+$")
end

local function submit(keys, args)
    local P, J = pool_prefix(keys), keys[1]
    local tenant, job, writer, seq = args[1], args[2], args[3], tonumber(args[4])
    local previous, op, tokens, digest, payload = args[5], args[6], args[7], args[8], args[9]
    if not (whole(args[4], 15) and seq > 0 and whole(tokens, 9) and #op <= 64 and string.match(op, "^[%w_]+$")
        and #digest == 40 and string.match(digest, "^%x+$") and J == job_key(P, tenant, job)) then
        return redis.error_reply("INVALID key, seq, tokens, op or digest")
    end
    local f = redis.call("HMGET", J, "state", "writer", "last_seq", "done_seq", "chain", "batch", "worker", "vtime",
        "backlog_bytes")
    if not f[1] then return { "unknown", 0, "", 0 } end
    local state, last, done, chain, bytes = f[1], number(f[3]), number(f[4]), f[5], number(f[9])
    local function reply(status) return { status, last, chain, done } end

    if f[2] ~= writer then return reply("fenced") end
    if seq <= last then
        local entry = redis.call("XRANGE", J .. ":requests", seq .. "-0", seq .. "-0")[1]
        if entry then
            for i = 1, #entry[2], 2 do
                if entry[2][i] == "digest" and entry[2][i + 1] ~= digest then return reply("conflict") end
            end
        end
        return reply("have")
    end
    if state ~= "open" then return reply("ended") end
    if seq > last + 1 then return reply("gap") end
    if previous ~= chain then return reply("diverged") end

    local limit = redis.call("HMGET", P .. "info", "max_backlog", "max_backlog_bytes", "max_payload_bytes")
    if limit[3] and #payload > number(limit[3]) then return reply("too_large") end
    if last > done then -- an empty backlog takes any request, or a large one could never be sent
        if limit[1] and last - done >= number(limit[1]) then return reply("full") end
        if limit[2] and bytes + #payload > number(limit[2]) then return reply("full") end
    end

    chain = redis.sha1hex(chain .. digest)
    last = seq
    redis.call("XADD", J .. ":requests", seq .. "-0", "op", op, "tokens", tokens, "digest", digest, "chain", chain,
        "accepted_ms", int(now_ms()), "payload", payload)
    redis.call("RPUSH", J .. ":queue", seq .. " " .. op .. " " .. tokens)
    redis.call("HSET", J, "last_seq", seq, "chain", chain, "backlog_bytes", int(bytes + #payload))
    if op == "end" then redis.call("HSET", J, "state", "ending") end
    if f[6] == "" and last == done + 1 then make_ready(P, tenant, job, f[7], f[8]) end
    ring(tenant_key(P, tenant) .. ":wake")
    return reply("accepted")
end
redis.register_function("ms_submit", submit)
