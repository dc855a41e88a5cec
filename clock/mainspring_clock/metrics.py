"""Prometheus metrics of a clock: its own cycles, and the pool as Redis has it.

The pool's metrics are read when somebody scrapes, and only by the clock that leads, so that a sum over all clocks is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import redis
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from mainspring_broker import functions, keys
from mainspring_clock.settings import ClockSettings

log = logging.getLogger("mainspring.clock")

CYCLE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CYCLE_TOKENS = (0, 100, 1_000, 5_000, 10_000, 50_000, 100_000, 500_000, 1_000_000)
TICK_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0)
MAX_JOBS = 2000  # looked at in one scrape
MAX_HEADERS = 256  # of one job's queue
TIMEOUT_S = 3.0  # a scrape does not hang on a server that does not answer


class ClockMetrics:
    """What a clock counts; always counted, served only when asked for."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.cycles = Counter("mainspring_cycles", "cycles this clock has closed", registry=registry)
        self.cycle_requests = Counter(
            "mainspring_cycle_requests", "requests in the cycles it has closed", registry=registry
        )
        self.cycle_seconds = Histogram(
            "mainspring_cycle_seconds", "from a boundary to the last commit", buckets=CYCLE_SECONDS, registry=registry
        )
        self.cycle_tokens = Histogram(
            "mainspring_cycle_tokens", "tokens in one cycle", buckets=CYCLE_TOKENS, registry=registry
        )
        self.tick_seconds = Histogram(
            "mainspring_tick_seconds", "one tick, Redis included", buckets=TICK_SECONDS, registry=registry
        )
        self.leader = Gauge("mainspring_clock_leader", "1: this clock leads, 0: it stands by", registry=registry)
        self.redis_errors = Counter(
            "mainspring_clock_redis_errors", "times that Redis did not answer", registry=registry
        )
        ProcessCollector(registry=registry)
        self._closing: list[Callable[[], None]] = []

    def cycle_closed(self, requests: int, tokens: int, seconds: float) -> None:
        """One cycle more."""
        self.cycles.inc()
        self.cycle_requests.inc(requests)
        self.cycle_seconds.observe(seconds)
        self.cycle_tokens.observe(tokens)

    def serve(self, settings: ClockSettings) -> None:
        """Answer scrapes from a thread of its own.

        Raises:
            OSError: the port is taken.
        """
        client = redis.Redis.from_url(settings.url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        self.registry.register(PoolCollector(client, settings.pool, lambda: self.leader_now))
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, self.registry)
        log.info("metrics at http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)
        self._closing += [server.shutdown, server.server_close, thread.join, client.close]

    def close(self) -> None:
        """Stop serving, if it does."""
        while self._closing:
            self._closing.pop(0)()

    @property
    def leader_now(self) -> bool:
        return bool(self.registry.get_sample_value("mainspring_clock_leader"))


class PoolCollector(Collector):
    """The pool as Redis has it at the moment of a scrape."""

    def __init__(self, client: redis.Redis, pool: str, leads: Callable[[], bool]) -> None:
        self.client: Any = client  # redis-py types each reply as bytes | str; here they are always bytes
        self.pool = pool
        self.leads = leads

    @staticmethod
    def describe() -> list[GaugeMetricFamily]:
        """The metrics, without values."""
        return [
            GaugeMetricFamily("mainspring_pool_clocks", "clocks that live, standbys included"),
            GaugeMetricFamily("mainspring_pool_workers", "workers that are registered"),
            GaugeMetricFamily("mainspring_pool_slots", "jobs that the workers can hold"),
            GaugeMetricFamily("mainspring_pool_slots_used", "jobs that the workers hold"),
            GaugeMetricFamily("mainspring_pool_tenants", "tenants that were let in"),
            GaugeMetricFamily("mainspring_pool_jobs", "jobs that have not ended"),
            GaugeMetricFamily("mainspring_pool_backlog_requests", "requests accepted and not yet done"),
            GaugeMetricFamily("mainspring_pool_backlog_tokens", "tokens of these requests"),
            GaugeMetricFamily(
                "mainspring_worker_heartbeat_age_seconds", "since a worker's last sign of life", labels=["worker"]
            ),
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self.leads():
            return
        try:
            values, ages = self._read()
        except RedisError as error:
            log.debug("a scrape found no Redis: %s", error)  # the clock itself says more
            return
        for family in self.describe():
            short = family.name.removeprefix("mainspring_pool_")
            if short in values:
                family.add_metric([], values[short])
            else:
                for worker, age in ages.items():
                    family.add_metric([worker], age)
            yield family

    def _read(self) -> tuple[dict[str, float], dict[str, float]]:
        pool, client = self.pool, self.client
        seconds, micros = client.time()
        beats = {functions.text(name): beat for name, beat in client.zrange(keys.workers(pool), 0, -1, withscores=True)}
        pipeline = client.pipeline(transaction=False)
        for name in beats:
            pipeline.hmget(keys.worker(pool, name), "slots", "jobs")
        slots = [(int(total or 0), int(used or 0)) for total, used in pipeline.execute()]
        tenants = [functions.text(name) for name in client.hkeys(keys.tenants(pool))]
        for tenant in tenants:
            pipeline.scard(keys.jobs(pool, tenant))
        jobs = sum(pipeline.execute())
        requests, tokens = self._backlog(tenants)
        values = {
            "clocks": client.zcard(keys.clocks(pool)),
            "workers": len(beats),
            "slots": sum(total for total, _ in slots),
            "slots_used": sum(used for _, used in slots),
            "tenants": len(tenants),
            "jobs": jobs,
            "backlog_requests": requests,
            "backlog_tokens": tokens,
        }
        now = seconds + micros / 1e6
        return values, {name: max(now - beat / 1000, 0.0) for name, beat in beats.items()}

    def _backlog(self, tenants: list[str]) -> tuple[int, int]:
        """Requests and tokens that wait, of MAX_JOBS jobs at most."""
        pool = self.pool
        found = (
            (tenant, functions.text(name))
            for tenant in tenants
            for name in self.client.sscan_iter(keys.jobs(pool, tenant), count=500)
        )
        pipeline = self.client.pipeline(transaction=False)
        for tenant, job in islice(found, MAX_JOBS):
            pipeline.llen(keys.queue(pool, tenant, job))
            pipeline.lrange(keys.queue(pool, tenant, job), 0, MAX_HEADERS - 1)
        replies = pipeline.execute()
        headers = [header.split() for queue in replies[1::2] for header in queue]
        return sum(replies[::2]), sum(int(words[2]) for words in headers if len(words) > 2)
