-- version: which library is loaded.
-- KEYS[1] info (for routing only)
-- ARGV none
-- Returns the version string.
-- Atomic because it reads nothing.
local function version()
    return VERSION
end
redis.register_function { function_name = "ms_version", callback = version, flags = { "no-writes" } }
