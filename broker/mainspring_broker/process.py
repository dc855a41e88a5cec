"""What every long-running process of the service does at its start."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Any

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from mainspring_broker import library
from mainspring_broker.errors import EvictionPolicyUnsafe
from mainspring_broker.logs import Trouble, hide_password
from mainspring_broker.retry import Backoff

log = logging.getLogger("mainspring")

SAFE_POLICY = "noeviction"


def on_signal_stop(stop: Callable[[], None]) -> None:
    """SIGTERM and SIGINT ask for an orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def wait_for_server(client: redis.Redis, url: str, stopping: Callable[[], bool]) -> bool:
    """Block until the server answers. False: stopped before it did. Says now and then that it waits."""
    backoff, trouble = Backoff(), Trouble(log, f"waiting for Redis at {hide_password(url)}")
    while not stopping():
        try:
            client.ping()
            trouble.over()
            return True
        except RedisError as error:
            if not isinstance(error, RedisConnectionError | redis.TimeoutError | redis.BusyLoadingError):
                raise
            trouble.again(error)
            time.sleep(backoff.next())
    return False


def check_server(client: redis.Redis) -> str:
    """The server's name and version, if it is one to trust with people's work.

    Raises:
        ServerUnsupported: too old for function libraries.
        EvictionPolicyUnsafe: it would evict keys when its memory is full; each key here is a piece of somebody's work.
    """
    name = library.check_server(client)
    memory: dict[str, Any] = client.info("memory")
    policy = str(memory.get("maxmemory_policy", SAFE_POLICY))
    if policy != SAFE_POLICY:
        raise EvictionPolicyUnsafe(
            f"{name} has maxmemory-policy {policy}: with its memory full it would throw away queued requests and results; "
            f"set it to {SAFE_POLICY} (redis-cli CONFIG SET maxmemory-policy {SAFE_POLICY}, and in its configuration file)",
            policy=policy,
        )
    return name
