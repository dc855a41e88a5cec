"""Entry of a clock process."""

from __future__ import annotations

import logging

import redis

from mainspring_broker import library
from mainspring_broker.process import configure_logging, on_signal_stop, wait_for_server
from mainspring_clock.daemon import Clock
from mainspring_clock.settings import ClockSettings

log = logging.getLogger("mainspring.clock")


def run_clock(settings: ClockSettings | None = None) -> int:
    """Run a clock until SIGTERM or SIGINT. Returns the exit status.

    Raises:
        ServerUnsupported: the server is too old for function libraries.
    """
    settings = settings or ClockSettings()
    configure_logging(settings.log_level)
    client = redis.Redis.from_url(settings.url, health_check_interval=30, socket_timeout=30)
    clock = Clock(settings, client)
    on_signal_stop(clock.stop)
    try:
        if wait_for_server(client, settings.url, lambda: clock.stopping):
            library.check_server(client)
            clock.run()
    finally:
        client.close()
    log.info("clock %s has stopped", clock.name)
    return 0
