"""Entry of a clock process."""

from __future__ import annotations

import logging

import redis

from mainspring_broker.errors import MainspringError
from mainspring_broker.logs import configure_logging
from mainspring_broker.process import check_server, on_signal_stop, wait_for_server
from mainspring_clock.daemon import Clock
from mainspring_clock.settings import ClockSettings

log = logging.getLogger("mainspring.clock")


def run_clock(settings: ClockSettings | None = None) -> int:
    """Run a clock until SIGTERM or SIGINT. Returns the exit status: 1 when the server is not fit for a pool."""
    settings = settings or ClockSettings()
    configure_logging(settings.log_level, settings.log_format)
    client = redis.Redis.from_url(settings.url, health_check_interval=30, socket_timeout=30)
    clock = Clock(settings, client)
    on_signal_stop(clock.stop)
    if settings.metrics_port:
        clock.metrics.serve(settings)
    try:
        if wait_for_server(client, settings.url, lambda: clock.stopping):
            check_server(client)
            clock.run()
    except MainspringError as error:
        log.error("clock %s: %s [%s]", clock.name, error.message, error.code)
        return 1
    finally:
        clock.metrics.close()
        client.close()
    log.info("clock %s has stopped", clock.name)
    return 0
