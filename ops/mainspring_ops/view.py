"""What people look at, read from Redis: jobs, workers, cycles, tenants and single keys.

All reading for the command line goes through here. Nothing is written, and every read is bounded: sets are scanned up
to a limit, streams are read from their end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import redis

from mainspring_broker import keys


@dataclass(frozen=True, slots=True)
class Job:
    """One job, as its hash tells it."""

    tenant: str
    name: str
    state: str
    base_model: str
    rank: int
    worker: str  # "" while no worker holds it
    queued: int  # accepted, not done
    done: int
    updates: int
    failed: int
    backlog_bytes: int  # of payloads that are queued
    active_ms: int | None  # end of its last cycle by the server's clock; None: it has not run


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker and its heartbeat."""

    name: str
    state: str
    jobs: int
    slots: int
    load: float  # decaying sum of tokens, what placement looks at
    silent_ms: int  # since its last heartbeat
    registered_ms: int
    fields: Mapping[str, str]  # its whole hash


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant and its share."""

    name: str
    weight: float
    jobs: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one job did in one cycle."""

    tenant: str
    job: str
    worker: str
    ops: tuple[str, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """One finished cycle."""

    number: int
    started_ms: int
    ms: int
    requests: int
    tokens: int
    parts: tuple[Part, ...]
    workers: Mapping[str, Any]  # each worker's own timings


class View:
    """Read-only look at one pool."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self.client: Any = client  # redis-py types each reply as bytes | str; here they are always bytes
        self.pool = pool

    def now_ms(self) -> int:
        """The server's clock."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def info(self) -> dict[str, str]:
        return _texts(self.client.hgetall(keys.info(self.pool)))

    def clock(self) -> dict[str, str]:
        return _texts(self.client.hgetall(keys.clock(self.pool)))

    def has_leader(self) -> bool:
        """Whether a clock holds the lease."""
        return bool(self.client.exists(keys.lease(self.pool)))

    def tenants(self, limit: int = 1000) -> list[Tenant]:
        pairs = sorted(islice(self.client.hscan_iter(keys.tenants(self.pool), count=200), limit))
        pipeline = self.client.pipeline(transaction=False)
        for name, _ in pairs:
            pipeline.scard(keys.jobs(self.pool, name.decode()))
        return [
            Tenant(name.decode(), float(weight), int(jobs))
            for (name, weight), jobs in zip(pairs, pipeline.execute(), strict=True)
        ]

    def jobs(self, tenant: str | None = None, limit: int = 1000) -> list[Job]:
        """Jobs that have not ended, `limit` at most, by tenant and name."""
        names = [tenant] if tenant else [t.name for t in self.tenants()]
        found = list(islice(self._job_names(names), limit))
        pipeline = self.client.pipeline(transaction=False)
        for owner, name in found:
            pipeline.hgetall(keys.job(self.pool, owner, name))
        hashes = [_texts(reply) for reply in pipeline.execute()]
        return sorted(
            (_job(owner, name, fields) for (owner, name), fields in zip(found, hashes, strict=True) if fields),
            key=lambda job: (job.tenant, job.name),
        )

    def workers(self, limit: int = 1000) -> list[Worker]:
        """Workers by name."""
        now = self.now_ms()
        beats = sorted(islice(self.client.zscan_iter(keys.workers(self.pool), count=200), limit))
        pipeline = self.client.pipeline(transaction=False)
        for name, _ in beats:
            pipeline.hgetall(keys.worker(self.pool, name.decode()))
        hashes = [_texts(reply) for reply in pipeline.execute()]
        return [
            Worker(
                name=name.decode(),
                state=fields.get("state", "?"),
                jobs=_int(fields, "jobs"),
                slots=_int(fields, "slots"),
                load=float(fields.get("load") or 0),
                silent_ms=max(0, now - int(beat)),
                registered_ms=_int(fields, "registered_ms"),
                fields=fields,
            )
            for (name, beat), fields in zip(beats, hashes, strict=True)
        ]

    def cycles(self, last: int) -> list[Cycle]:
        """The last finished cycles, oldest first."""
        entries = self.client.xrevrange(keys.cycles(self.pool), count=last)
        return [_cycle(entry_id, fields) for entry_id, fields in reversed(entries)]

    def cycles_after(self, number: int, wait_ms: int) -> list[Cycle]:
        """Cycles finished after cycle `number`; waits up to `wait_ms` for one."""
        stream = keys.cycles(self.pool)
        reply: Any = self.client.xread({stream: f"{number}-0"}, count=100, block=wait_ms)
        pages = reply.values() if isinstance(reply, dict) else [entries for _, entries in reply or []]
        entries = [entry for page in pages for entry in page]
        return [_cycle(entry_id, fields) for entry_id, fields in entries]

    def _job_names(self, tenants: list[str]) -> Iterator[tuple[str, str]]:
        for tenant in tenants:
            for name in self.client.sscan_iter(keys.jobs(self.pool, tenant), count=200):
                yield tenant, name.decode()


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


def _int(fields: Mapping[str, str], name: str) -> int:
    return int(float(fields.get(name) or 0))


def _job(tenant: str, name: str, fields: Mapping[str, str]) -> Job:
    return Job(
        tenant=tenant,
        name=name,
        state=fields.get("state", "?"),
        base_model=fields.get("base_model", "?"),
        rank=_int(fields, "rank"),
        worker=fields.get("worker", ""),
        queued=_int(fields, "last_seq") - _int(fields, "done_seq"),
        done=_int(fields, "done_seq"),
        updates=_int(fields, "updates"),
        failed=_int(fields, "failed"),
        backlog_bytes=_int(fields, "backlog_bytes"),
        active_ms=_int(fields, "active_ms") or None,
    )


def _cycle(entry_id: bytes, raw: Mapping[bytes, bytes]) -> Cycle:
    fields = _texts(raw)
    plan = json.loads(fields.get("plan") or "[]")
    return Cycle(
        number=int(entry_id.partition(b"-")[0]),
        started_ms=_int(fields, "started_ms"),
        ms=_int(fields, "ms"),
        requests=_int(fields, "requests"),
        tokens=_int(fields, "tokens"),
        parts=tuple(
            Part(str(tenant), str(job), str(worker), tuple(str(ops).split()), int(tokens))
            for tenant, job, worker, ops, tokens in plan
        ),
        workers=json.loads(fields.get("workers") or "{}"),
    )
