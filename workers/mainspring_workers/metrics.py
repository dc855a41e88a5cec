"""Prometheus metrics of a worker: what it has computed, and how long each part of a batch took."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from mainspring_broker.errors import BY_CODE
from mainspring_broker.functions import Executed
from mainspring_broker.wire import OPS
from mainspring_workers.settings import WorkerSettings

log = logging.getLogger("mainspring.worker")

COMPUTE_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REDIS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.0, 10.0)
OTHER = "other"  # the label for what only a client's mistake could name


class WorkerMetrics:
    """What a worker counts; always counted, served only when asked for."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter(
            "mainspring_requests",
            "requests executed; outcome is ok or the code of the error",
            ["op", "outcome"],
            registry=registry,
        )
        self.tokens = Counter("mainspring_worker_tokens", "tokens computed", registry=registry)
        self.tokens_per_second = Gauge(
            "mainspring_worker_tokens_per_second",
            "of the last batch with tokens, while it was computed",
            registry=registry,
        )
        self.fetch_seconds = Histogram(
            "mainspring_worker_fetch_seconds",
            "reading one batch's payloads from Redis",
            buckets=REDIS_SECONDS,
            registry=registry,
        )
        self.compute_seconds = Histogram(
            "mainspring_worker_compute_seconds", "computing one batch", buckets=COMPUTE_SECONDS, registry=registry
        )
        self.commit_seconds = Histogram(
            "mainspring_worker_commit_seconds",
            "writing one batch's results to Redis",
            buckets=REDIS_SECONDS,
            registry=registry,
        )
        self.dropped = Counter(
            "mainspring_worker_batches_dropped", "batches taken back before they were committed", registry=registry
        )
        self.jobs = Gauge("mainspring_worker_jobs", "jobs whose adapter is here", registry=registry)
        self.redis_errors = Counter(
            "mainspring_worker_redis_errors", "times that Redis did not answer", registry=registry
        )
        ProcessCollector(registry=registry)
        self._closing: list[Callable[[], None]] = []

    def batch(
        self,
        executed: Iterable[Executed],
        tokens: int,
        fetch_s: float,
        compute_s: float,
        commit_s: float,
        *,
        committed: bool,
    ) -> None:
        """One batch more: how long its parts took and, when it was committed, its requests."""
        self.fetch_seconds.observe(fetch_s)
        self.compute_seconds.observe(compute_s)
        self.commit_seconds.observe(commit_s)
        self.tokens.inc(tokens)
        if tokens and compute_s > 0:
            self.tokens_per_second.set(tokens / compute_s)
        if not committed:
            self.dropped.inc()
            return
        for each in executed:
            op = each.op if each.op in OPS else OTHER
            outcome = each.outcome if each.outcome == "ok" or each.outcome in BY_CODE else OTHER
            self.requests.labels(op, outcome).inc()

    def serve(self, settings: WorkerSettings) -> None:
        """Answer scrapes from a thread of its own.

        Raises:
            OSError: the port is taken.
        """
        server, thread = start_http_server(settings.metrics_port, settings.metrics_host, self.registry)
        log.info("metrics at http://%s:%d/metrics", settings.metrics_host, settings.metrics_port)
        self._closing += [server.shutdown, server.server_close, thread.join]

    def close(self) -> None:
        """Stop serving, if it does."""
        while self._closing:
            self._closing.pop(0)()
