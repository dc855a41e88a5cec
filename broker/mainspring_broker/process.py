"""What every long-running process of the service does at its start."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from mainspring_broker.retry import Backoff

log = logging.getLogger("mainspring")


def configure_logging(level: str) -> None:
    """One line an event on stderr: time, level, what."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("redis").setLevel(logging.INFO)  # its debug lines are about features that we do not use


def on_signal_stop(stop: Callable[[], None]) -> None:
    """SIGTERM and SIGINT ask for an orderly end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def wait_for_server(client: redis.Redis, url: str, stopping: Callable[[], bool]) -> bool:
    """Block until the server answers. False: stopped before it did. Says once that it waits."""
    backoff, told = Backoff(), False
    while not stopping():
        try:
            client.ping()
            return True
        except RedisError as error:
            if not isinstance(error, RedisConnectionError | redis.TimeoutError | redis.BusyLoadingError):
                raise
            if not told:
                log.warning("waiting for Redis at %s (%s)", url, error)
                told = True
            time.sleep(backoff.next())
    return False
