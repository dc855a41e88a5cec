"""The clock: ticks the pool's cycle boundaries, as long as it holds the lease.

    standby ── lease free ──> leading:   tick ─ started ─> wait for the barrier's bell ─┐
       ^                                  ^  └─ idle ─> sleep on wake lists ─> gather ──┤
       └── NotLeader ─────────────────────┴─────────────────────────────────────────────┘

All state is in Redis and every change is one atomic function, so a clock may die at any point: another goes on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time

import redis
from redis.exceptions import RedisError

from mainspring_broker import functions, keys, library
from mainspring_broker.errors import LibraryMissing, NotLeader
from mainspring_broker.logs import Trouble, fields
from mainspring_broker.retry import Backoff
from mainspring_clock.metrics import ClockMetrics
from mainspring_clock.policy import Gather
from mainspring_clock.settings import ClockSettings

log = logging.getLogger("mainspring.clock")

MAX_WAIT_S = 0.5


def now_ms() -> float:
    return time.monotonic() * 1000


class Clock:
    """One clock process. `run` blocks until `stop` is called (from a signal handler or another thread)."""

    def __init__(self, settings: ClockSettings, client: redis.Redis, *, name: str | None = None) -> None:
        self.settings = settings
        self.client = client
        self.name = name or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.token = secrets.token_hex(16)  # random, so that a lease never comes back after Redis lost a second
        self.metrics = ClockMetrics()
        self.stopping = False
        self.leading = False
        self._running: tuple[functions.TickReply, float] | None = None  # the cycle this clock started, and when (ms)
        self._trouble = Trouble(log, f"clock {self.name}: Redis")
        self._last_sign_ms = -1e18
        self._last_check_ms = -1e18
        self._waiting_for_worker = 0

    def stop(self) -> None:
        self.stopping = True

    def run(self) -> None:
        """Lead or stand by until stopped; outlives a Redis that goes away and comes back."""
        backoff = Backoff()
        while not self.stopping:
            try:
                if self._take_lease():
                    self._lead()
                else:
                    self._stand_by()
                backoff.reset()
            except NotLeader:
                self._step_down("another clock took the lease")
            except LibraryMissing:
                self._step_down("the function library is gone from the server; loading it again")
            except RedisError as error:
                self._step_down("Redis does not answer")
                self._trouble.again(error)
                self.metrics.redis_errors.inc()
                self._pause(backoff.next())
        self._resign()

    # -- leadership ---------------------------------------------------------------------------------------------------

    def _take_lease(self) -> bool:
        s = self.settings
        call = functions.lead(pool=s.pool, token=self.token, lease_ms=s.lease_ms, name=self.name)
        try:
            took = functions.run(self.client, call)
        except LibraryMissing:  # the first clock on a fresh server
            library.load(self.client)
            took = functions.run(self.client, call)
        self._last_sign_ms = now_ms()
        self._trouble.over()
        if took and not self.leading:
            library.load(self.client)
            self._publish_pool()
            self.leading = True
            self.metrics.leader.set(1)
            log.info("clock %s leads pool %s", self.name, s.pool)
        return took

    def _say_that_it_lives(self) -> None:
        """Ticks keep the lease; now and then the leader is also put on the list of clocks, where standbys are."""
        if now_ms() - self._last_sign_ms > self.settings.lease_ms / 4 and not self._take_lease():
            raise NotLeader("another clock took the lease")

    def _stand_by(self) -> None:
        """Wait for the leader's lease to end, so that the take-over comes within one lease time."""
        left_ms = self.client.pttl(keys.lease(self.settings.pool))
        self._pause(min(max(left_ms, 0) + 5, self.settings.lease_ms / 4) / 1000)

    def _publish_pool(self) -> None:
        s = self.settings
        self.client.hset(
            keys.info(s.pool),
            mapping={
                "library": library.version(),
                "token_budget": s.token_budget,
                "max_backlog": s.max_backlog,
                "max_backlog_bytes": s.max_backlog_bytes,
                "max_payload_bytes": s.max_payload_bytes,
            },
        )
        known = set(map(functions.text, self.client.hkeys(keys.tenants(s.pool))))
        for name, weight in parse_tenants(s.tenants).items():
            if name not in known:  # a weight that an operator set later stays
                functions.run(self.client, functions.add_tenant(pool=s.pool, tenant=name, weight=weight))

    def _step_down(self, why: str) -> None:
        if self.leading:
            log.warning("clock %s steps down: %s", self.name, why)
        self.leading = False
        self.metrics.leader.set(0)
        self._running = None

    def _resign(self) -> None:
        with contextlib.suppress(RedisError, LibraryMissing):  # the lease then runs out by itself
            functions.run(self.client, functions.resign(pool=self.settings.pool, token=self.token, name=self.name))

    # -- cycles -------------------------------------------------------------------------------------------------------

    def _lead(self) -> None:
        while not self.stopping:
            begun = now_ms()
            reply = self._tick()
            self._note_cycle(reply, begun)
            self._say_that_it_lives()
            self._remove_dead_workers()
            match reply.status:
                case "started" | "running":
                    self._wait([keys.bell(self.settings.pool)])
                case "idle":
                    self._note_unplaced(reply.unplaced)
                    self._sleep_until_work()

    def _note_cycle(self, reply: functions.TickReply, begun: float) -> None:
        """Log and measure the cycle that this tick has found finished, and remember the one that it started."""
        self.metrics.tick_seconds.observe((now_ms() - begun) / 1000)
        if reply.status == "running":
            return
        if self._running is not None:
            cycle, started = self._running
            ms = begun - started
            self.metrics.cycle_closed(cycle.requests, cycle.tokens, ms / 1000)
            facts = fields(
                cycle=cycle.cycle, jobs=cycle.jobs, requests=cycle.requests, tokens=cycle.tokens, ms=round(ms, 1)
            )
            log.info("cycle closed", extra=facts)
        self._running = (reply, now_ms()) if reply.status == "started" else None

    def _tick(self) -> functions.TickReply:
        s = self.settings
        return functions.run(
            self.client,
            functions.tick(
                pool=s.pool,
                token=self.token,
                lease_ms=s.lease_ms,
                budget_tokens=s.token_budget,
                dead_after_ms=s.worker_timeout_ms,
                history=s.history_cycles,
                batch_seed=secrets.token_hex(16),
            ),
        )

    def _wait(self, waited_for: list[str]) -> str | None:
        """Block until one of the lists has a token; not for long, so that the lease is kept and a signal is seen."""
        popped = self.client.blpop(waited_for, timeout=min(self.settings.lease_ms / 1000 / 3, MAX_WAIT_S))
        return functions.text(popped[0]) if popped else None

    def _sleep_until_work(self) -> None:
        """An idle pool: sleep until something arrives, then gather for a moment, so that a pair sent together runs together."""
        s = self.settings
        bell = keys.bell(s.pool)
        wakes = [keys.wake(s.pool, functions.text(name)) for name in self.client.hkeys(keys.tenants(s.pool))]
        woken = self._wait([bell, *wakes])
        if woken is None or woken == bell:
            return
        gather = Gather(s.gather_ms, s.gather_limit_ms)
        gather.started(now_ms())
        while (left := gather.wait_ms(now_ms())) > 0:
            if self.client.blpop(wakes, timeout=max(left, 1.0) / 1000):
                gather.arrived(now_ms())

    # -- workers ------------------------------------------------------------------------------------------------------

    def _remove_dead_workers(self) -> None:
        """Look for silent workers now and then; what such a worker had in hand becomes eligible again."""
        s = self.settings
        if now_ms() - self._last_check_ms < s.worker_timeout_ms / 4:
            return
        self._last_check_ms = now_ms()
        seconds, micros = self.client.time()
        latest = seconds * 1000 + micros // 1000 - s.worker_timeout_ms
        for name in map(functions.text, self.client.zrangebyscore(keys.workers(s.pool), "-inf", latest)):
            call = functions.requeue(pool=s.pool, worker=name, lease=self.token, dead_after_ms=s.worker_timeout_ms)
            moved = functions.run(self.client, call)
            if moved is not None:
                log.warning("worker %s is dead (no heartbeat): %d jobs are placed anew", name, moved)

    def _note_unplaced(self, unplaced: int) -> None:
        if unplaced != self._waiting_for_worker:
            self._waiting_for_worker = unplaced
            if unplaced:
                log.warning(
                    "jobs waiting for a worker with a free slot: %d; end others (mainspring end) or start one more worker",
                    unplaced,
                )

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.stopping and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))


def parse_tenants(text: str) -> dict[str, float]:
    """Names and weights from "a, b=2.5".

    Raises:
        ValueError: a name that cannot be part of a key, or a weight that is not a positive number.
    """
    tenants: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, weight = part.partition("=")
        value = float(weight) if weight else 1.0
        if not 0 < value < 1e6:
            raise ValueError(f"tenant {name}: the weight must be above 0 and below 1,000,000, got {weight}")
        tenants[keys.check_name("tenant", name.strip())] = value
    return tenants
