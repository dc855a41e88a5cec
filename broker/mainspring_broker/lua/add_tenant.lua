-- add_tenant: let a tenant into the pool, or change its weight.
-- KEYS[1] info
-- ARGV[1] tenant   ARGV[2] weight (share of the pool relative to other tenants)
-- Returns 1 added, 0 its weight was set.
-- Atomic because the clock must see the tenant and be woken for it together.
local function add_tenant(keys, args)
    local P = pool_prefix(keys)
    local added = redis.call("HSET", P .. "tenants", args[1], args[2])
    ring(P .. "bell")
    return added
end
redis.register_function("ms_add_tenant", add_tenant)
