"""What tests share: waiting for conditions, and a pool driven by hand, one function call at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import redis

from mainspring_broker import functions, keys
from mainspring_broker.functions import Batch, Executed, JobHead, TickReply, run

POLL_S = 0.005
BASE_MODEL = "tiny"


def wait_until(predicate: Callable[[], Any], description: str, timeout: float = 30) -> Any:
    """The first true value of `predicate`. Fails with the description after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for: {description}")
        time.sleep(POLL_S)
    return value


async def wait_until_async(predicate: Callable[[], Any], description: str, timeout: float = 30) -> Any:
    """As `wait_until`, without blocking the event loop; `predicate` may also return an awaitable."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout} s in vain for: {description}")
        await asyncio.sleep(POLL_S)


@dataclass
class Job:
    """A job as its client sees it: the sender's own seq and chain."""

    scene: Scene
    tenant: str
    name: str
    writer: str
    seq: int = 0
    chain: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return keys.job(self.scene.pool, self.tenant, self.name)

    def call(self, op: str, tokens: int = 0, payload: bytes = b"", **changed: Any) -> JobHead:
        """One submit of the next request, as it is or with some arguments changed; the sender's memory stays."""
        arguments: dict[str, Any] = {
            "pool": self.scene.pool,
            "tenant": self.tenant,
            "job": self.name,
            "writer": self.writer,
            "seq": self.seq + 1,
            "chain": self.chain,
            "op": op,
            "tokens": tokens,
            "payload": payload,
            **changed,
        }
        arguments.setdefault("digest", functions.request_digest(arguments["op"], arguments["payload"]))
        return run(self.scene.r, functions.submit(**arguments))

    def submit(self, *ops: str | tuple[str, int], payload: bytes = b"") -> Job:
        """Append requests, each an op or (op, tokens), all accepted."""
        for each in ops:
            op, tokens = (each, 0) if isinstance(each, str) else each
            head = self.call(op, tokens, payload)
            assert head.status == "accepted", head
            self.seq += 1
            self.digests[self.seq] = functions.request_digest(op, payload)
            self.bodies[self.seq] = payload
            self.chain = functions.chain_next(self.chain, self.digests[self.seq])
            assert (head.last_seq, head.chain) == (self.seq, self.chain)
        return self

    def update(self, tokens: int = 10) -> Job:
        """One update: a forward_backward and an optim_step."""
        return self.submit(("forward_backward", tokens), "optim_step")

    def cancel(self, seq: int, writer: str | None = None) -> bool:
        return run(
            self.scene.r,
            functions.cancel(
                pool=self.scene.pool, tenant=self.tenant, job=self.name, writer=writer or self.writer, seq=seq
            ),
        )

    def field(self, name: str) -> str:
        """One field of the job's hash, "" when it is not there."""
        return (self.scene.r.hget(self.key, name) or b"").decode()

    def queue(self) -> list[str]:
        """The headers that are not finished yet."""
        return [header.decode() for header in self.scene.r.lrange(self.key + ":queue", 0, -1)]

    def stream(self) -> list[int]:
        """The seqs whose requests are still in the stream."""
        return [int(entry.split(b"-")[0]) for entry, _ in self.scene.r.xrange(self.key + ":requests")]


@dataclass
class Scene:
    """A pool driven by hand: no clock and no worker process, only the functions, called one by one."""

    r: redis.Redis
    pool: str
    token: str = "lease-of-the-test"
    incarnations: dict[str, str] = field(default_factory=dict)
    numbers: Any = field(default_factory=count)

    def fresh(self, what: str) -> str:
        return f"{what}-{next(self.numbers)}"

    def add_tenant(self, name: str = "acme", weight: float = 1.0) -> bool:
        return run(self.r, functions.add_tenant(pool=self.pool, tenant=name, weight=weight))

    def register(self, worker: str = "w1", slots: int = 8, base_model: str = BASE_MODEL, **fields: str | int) -> int:
        """A worker process of that name appears, with a new incarnation."""
        self.incarnations[worker] = self.fresh(f"incarnation-{worker}")
        return run(
            self.r,
            functions.register(
                pool=self.pool,
                worker=worker,
                incarnation=self.incarnations[worker],
                slots=slots,
                base_model=base_model,
                base_model_path=f"models/{base_model}",
                vocab_size=100,
                max_length=64,
                fields=fields,
            ),
        )

    def heartbeat(self, worker: str = "w1", incarnation: str | None = None) -> bool:
        return run(
            self.r,
            functions.heartbeat(
                pool=self.pool, worker=worker, incarnation=incarnation or self.incarnations.get(worker, "none")
            ),
        )

    def declare_silent(self, worker: str, for_ms: int = 60_000) -> None:
        """Set the worker's last heartbeat back, as if it had died that long ago."""
        self.r.zincrby(keys.workers(self.pool), -for_ms, worker)

    def requeue(self, worker: str = "w1", **changed: Any) -> int | None:
        return run(self.r, functions.requeue(pool=self.pool, worker=worker, **changed))

    def create(self, tenant: str = "acme", job: str = "j1", **changed: Any) -> JobHead:
        arguments: dict[str, Any] = {
            "pool": self.pool,
            "tenant": tenant,
            "job": job,
            "writer": f"writer-of-{job}",
            "base_model": BASE_MODEL,
            "rank": 8,
            "spec": {},
            **changed,
        }
        return run(self.r, functions.create_job(**arguments))

    def job(self, name: str = "j1", tenant: str = "acme") -> Job:
        """A new job of a tenant, who is added when new."""
        if not self.r.hexists(keys.tenants(self.pool), tenant):
            self.add_tenant(tenant)
        head = self.create(tenant, name)
        assert head.status == "created", head
        return Job(self, tenant, name, f"writer-of-{name}", chain=head.chain)

    def lead(self, token: str | None = None, lease_ms: int = 60_000, name: str = "test") -> bool:
        return run(self.r, functions.lead(pool=self.pool, token=token or self.token, lease_ms=lease_ms, name=name))

    def resign(self, token: str | None = None, name: str = "test") -> bool:
        return run(self.r, functions.resign(pool=self.pool, token=token or self.token, name=name))

    def tick(
        self, budget: int = 1_000_000, dead_after_ms: int = 30_000, history: int = 100, **changed: Any
    ) -> TickReply:
        """Close a boundary; takes the lease first unless `token` is given."""
        if "token" not in changed:
            assert self.lead()
        arguments: dict[str, Any] = {
            "pool": self.pool,
            "token": self.token,
            "lease_ms": 60_000,
            "budget_tokens": budget,
            "dead_after_ms": dead_after_ms,
            "history": history,
            "batch_seed": self.fresh("seed"),
            **changed,
        }
        return run(self.r, functions.tick(**arguments))

    def batch(self, worker: str = "w1") -> Batch | None:
        """The worker's batch of the running cycle, if it has one."""
        token = self.r.hget(keys.pending(self.pool), worker)
        for _, fields in self.r.xrevrange(keys.worker_batches(self.pool, worker)):
            if fields[b"batch"] == token:
                return functions.decode_batch(fields)
        return None

    def executed(
        self, batch: Batch, failed: Iterable[tuple[str, int]] = (), result: bytes = b"result"
    ) -> list[Executed]:
        """What a worker that ran the batch would commit; `failed` names (job, seq) that went wrong."""
        failed = set(failed)
        rows = []
        for j in batch.jobs:
            stream = dict(self.r.xrange(keys.requests(self.pool, j.tenant, j.job)))
            for header in j.requests:
                entry = stream[f"{header.seq}-0".encode()]
                outcome = "internal_error" if (j.job, header.seq) in failed else "ok"
                rows.append(
                    Executed(
                        j.tenant,
                        j.job,
                        header.seq,
                        header.op,
                        outcome,
                        entry[b"digest"].decode(),
                        len(entry[b"payload"]),
                        result,
                    )
                )
        return rows

    def commit(self, worker: str = "w1", failed: Iterable[tuple[str, int]] = (), **changed: Any) -> Batch:
        """The worker finishes its batch; the reply is the batch. Raises StaleBatch when it is no longer the worker's."""
        batch = changed.pop("batch", None) or self.batch(worker)
        assert batch is not None, f"{worker} has no batch"
        arguments: dict[str, Any] = {
            "pool": self.pool,
            "worker": worker,
            "incarnation": self.incarnations[worker],
            "batch": batch.token,
            "result_ttl_ms": 60_000,
            "timings": {"compute_ms": 1.5},
            **changed,
        }
        if "executed" not in arguments:
            arguments["executed"] = self.executed(batch, failed)
        run(self.r, functions.commit(**arguments))
        return batch

    def ready(self, tenant: str = "acme", worker: str = keys.UNPLACED) -> list[str]:
        """The tenant's jobs with an eligible head on that worker, furthest behind first."""
        return [job.decode() for job in self.r.zrange(keys.ready(self.pool, tenant, worker), 0, -1)]

    def clock(self, name: str) -> str:
        return (self.r.hget(keys.clock(self.pool), name) or b"").decode()

    def history(self) -> list[dict[str, str]]:
        """The finished cycles, oldest first."""
        return [
            {"id": entry.decode(), **{k.decode(): v.decode() for k, v in fields.items()}}
            for entry, fields in self.r.xrange(keys.cycles(self.pool))
        ]

    def everything(self) -> dict[bytes, Any]:
        """Each key with its value: two equal snapshots mean that nothing was written."""
        names = list(self.r.scan_iter(count=1000))
        read: dict[bytes, Callable[[Any, bytes], Any]] = {
            b"hash": lambda pipe, key: pipe.hgetall(key),
            b"list": lambda pipe, key: pipe.lrange(key, 0, -1),
            b"set": lambda pipe, key: pipe.smembers(key),
            b"stream": lambda pipe, key: pipe.xrange(key),
            b"string": lambda pipe, key: pipe.get(key),
            b"zset": lambda pipe, key: pipe.zrange(key, 0, -1, withscores=True),
        }
        with self.r.pipeline(transaction=False) as pipe:
            for key in names:
                pipe.type(key)
            for key, kind in zip(names, pipe.execute(), strict=True):
                read[kind](pipe, key)
            return dict(zip(names, pipe.execute(), strict=True))


def taken(batch: Batch | None) -> dict[str, list[int]]:
    """The seqs that each job runs in a batch, by job name."""
    return {} if batch is None else {j.job: [header.seq for header in j.requests] for j in batch.jobs}
