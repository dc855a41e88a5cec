"""The small redis-cli of the docs test prints what the real one does."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import redis

from tests import redis_cli
from tests.conftest import Server

COMMANDS = [
    "PING",
    "HGETALL h",
    "ZRANGE z 0 -1 WITHSCORES",
    "XRANGE s - +",
    "XREAD COUNT 1 STREAMS s 0",
    "LRANGE l 0 -1",
    "LRANGE nothing 0 -1",
    "GET nothing",
    "TYPE h",
    "PTTL h",
    "SET new value",
]


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="redis-cli is not installed")
def test_it_prints_what_redis_cli_prints(own_server: Server) -> None:
    with redis.Redis.from_url(own_server.url, protocol=2) as client:
        client.hset("h", mapping={"plain": 1, "odd": 'x"y\\z\n\x00é'})
        client.zadd("z", {"one": 1.5, "two": 2})
        client.rpush("l", *range(12))
        client.xadd("s", {"op": "init", "n": 3}, id="1-0")
        client.xadd("s", {"op": "end"}, id="2-0")
        for command in COMMANDS:
            real = subprocess.run(
                ["redis-cli", "-s", own_server.url.removeprefix("unix://"), "--no-raw", *command.split()],
                capture_output=True,
                text=True,
                timeout=30,
            )
            assert redis_cli.run(client, command.split()) == real.stdout.rstrip("\n"), command
        client.flushall()
