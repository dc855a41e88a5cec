"""A typed call for each Lua function. Arguments are turned into bytes, and replies into values, here and nowhere else.

A call is a value: `run(redis, submit(…))` executes it, `await run_async(redis, submit(…))` does the same on an asyncio
client, and nothing is written twice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import redis
import redis.asyncio
from redis.exceptions import ResponseError

from mainspring_broker import keys, library
from mainspring_broker.errors import (
    HistoryDiverged,
    JobEnded,
    JobExists,
    LibraryMissing,
    NotLeader,
    PayloadTooLarge,
    SequenceConflict,
    ServerFull,
    ServiceUnavailable,
    StaleBatch,
    UnknownBaseModel,
    UnknownJob,
    UnknownTenant,
    WorkerReplaced,
    WriterFenced,
)

T = TypeVar("T")
Arg = str | int | float | bytes


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One function call, not yet executed."""

    name: str
    keys: tuple[str, ...]
    args: tuple[Arg, ...]
    decode: Callable[[Any], T]


def run(client: redis.Redis, call: Call[T]) -> T:
    """Execute the call. Raises the typed errors that its function documents, and redis.ConnectionError."""
    try:
        reply = client.fcall(call.name, len(call.keys), *call.keys, *call.args)
    except ResponseError as error:
        raise translate(error) from None
    return call.decode(reply)


async def run_async(client: redis.asyncio.Redis, call: Call[T]) -> T:
    """Execute the call on an asyncio client. Otherwise as `run`."""
    try:
        reply = await client.fcall(call.name, len(call.keys), *call.keys, *call.args)
    except ResponseError as error:
        raise translate(error) from None
    return call.decode(reply)


def text(reply: Any) -> str:
    """A reply of plain Redis commands as text, whether or not the client decodes by itself."""
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def translate(error: ResponseError) -> Exception:
    """Our own exception for an error reply of the server, or the reply with the Lua file and line of a fault in it."""
    text = str(error)
    if "unction not found" in text:
        return LibraryMissing("the function library is not on the server: start a clock (mainspring clock)")
    if text.startswith("OOM") or "used memory > 'maxmemory'" in text:
        return ServerFull("Redis is out of memory (maxmemory): wait until results were read, or give it more memory")
    return type(error)(re.sub(r"user_function:(\d+)", lambda found: library.locate(int(found[1])), text))


# -- chains -----------------------------------------------------------------------------------------------------------


def request_digest(op: str, payload: bytes) -> str:
    """What a request is, in 40 hex digits: equal digests mean the same request."""
    return hashlib.sha1(op.encode() + b"\0" + payload, usedforsecurity=False).hexdigest()


def chain_start(tenant: str, job: str, writer: str) -> str:
    """The chain, and the lineage, of a job before its first request."""
    return hashlib.sha1(f"job {tenant} {job} {writer}".encode(), usedforsecurity=False).hexdigest()


def chain_next(chain: str, digest: str) -> str:
    """The chain after one more accepted request."""
    return hashlib.sha1((chain + digest).encode(), usedforsecurity=False).hexdigest()


def lineage_next(lineage: str, digest: str, outcome: str) -> str:
    """The lineage after one more executed request; `outcome` is "ok" or an error code."""
    return hashlib.sha1((lineage + digest + outcome).encode(), usedforsecurity=False).hexdigest()


# -- a tenant's client ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobHead:
    """How far a job has come, as the service sees it."""

    status: Literal["created", "accepted", "have", "gap", "full"]
    last_seq: int  # highest accepted
    chain: str  # after last_seq
    done_seq: int  # highest executed


def _head(reply: Any, where: str) -> JobHead:
    status, chain = bytes(reply[0]).decode(), bytes(reply[2]).decode()
    match status:
        case "created" | "accepted" | "have" | "gap" | "full":
            return JobHead(status, int(reply[1]), chain, int(reply[3]))
        case "unknown":
            raise UnknownJob(f"{where}: there is no such job (ended long ago, or Redis lost its data)")
        case "ended":
            raise JobEnded(f"{where}: the job has been ended, it takes no more requests")
        case "fenced":
            raise WriterFenced(f"{where}: another client has taken over this job")
        case "conflict":
            raise SequenceConflict(f"{where}: this sequence number was accepted before with another body")
        case "diverged":
            raise HistoryDiverged(f"{where}: the service remembers other requests of this job than this client sent")
        case "too_large":
            raise PayloadTooLarge(f"{where}: the payload is larger than the pool allows; send smaller batches")
        case "exists":
            raise JobExists(f"{where}: the id is taken by another client's job")
        case "unknown_tenant":
            raise UnknownTenant(f"{where}: the pool does not know this tenant; add it: mainspring tenants add NAME")
        case "no_worker":
            raise ServiceUnavailable(
                f"{where}: no worker has registered in this pool yet; start one: mainspring worker"
            )
        case "unknown_base_model":
            raise UnknownBaseModel(f"{where}: this pool serves the base model {chain!r}", base_model=chain)
    raise AssertionError(f"unknown reply {status!r}")


def create_job(
    *, pool: str, tenant: str, job: str, writer: str, base_model: str, rank: int, spec: Mapping[str, Any]
) -> Call[JobHead]:
    """Make a job's record.

    Raises:
        UnknownTenant, UnknownBaseModel, JobExists, ServiceUnavailable (no worker yet).
    """
    args = (tenant, job, writer, base_model, rank, json.dumps(dict(spec), sort_keys=True))
    where = f"job {tenant}/{job}"
    return Call(
        "ms_create_job",
        (keys.job(pool, tenant, job),),
        args,
        lambda reply: _head(reply, where),
    )


def submit(
    *,
    pool: str,
    tenant: str,
    job: str,
    writer: str,
    seq: int,
    chain: str,
    op: str,
    tokens: int,
    digest: str,
    payload: bytes,
) -> Call[JobHead]:
    """Append one request. `chain` is the sender's chain before it. Status accepted, have, gap or full.

    Raises:
        UnknownJob, JobEnded, WriterFenced, SequenceConflict, HistoryDiverged, PayloadTooLarge, ServerFull.
    """
    args = (tenant, job, writer, seq, chain, op, tokens, digest, payload)
    where = f"job {tenant}/{job}, request {seq} ({op})"
    return Call("ms_submit", (keys.job(pool, tenant, job),), args, lambda reply: _head(reply, where))


def cancel(*, pool: str, tenant: str, job: str, writer: str, seq: int) -> Call[bool]:
    """Mark a request that has not started. False: too late."""
    return Call(
        "ms_cancel",
        (keys.job(pool, tenant, job),),
        (writer, seq),
        lambda reply: int(reply) == 1,
    )


# -- the clock --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TickReply:
    """What a tick did."""

    status: Literal["started", "running", "idle"]
    cycle: int  # the cycle started or running, or the last one
    requests: int
    tokens: int
    jobs: int
    unplaced: int  # jobs that wait for a worker with a free slot


def _tick(reply: Any) -> TickReply:
    status = bytes(reply[0]).decode()
    if status == "not_leader":
        raise NotLeader("another clock leads this pool: this one's tick was refused")
    return TickReply(status, *(int(value) for value in reply[1:]))  # type: ignore[arg-type]


def lead(*, pool: str, token: str, lease_ms: int, name: str) -> Call[bool]:
    """Take or keep the clock's lease, and say that this clock lives. False: another clock leads."""
    return Call("ms_lead", (keys.info(pool),), (token, lease_ms, name), lambda reply: int(reply) == 1)


def resign(*, pool: str, token: str, name: str) -> Call[bool]:
    """Leave, and give the lease back. False: it was not held."""
    return Call("ms_resign", (keys.info(pool),), (token, name), lambda reply: int(reply) == 1)


def tick(
    *,
    pool: str,
    token: str,
    lease_ms: int,
    budget_tokens: int,
    dead_after_ms: int,
    history: int,
    batch_seed: str,
) -> Call[TickReply]:
    """Close a boundary. `batch_seed` is random and new for each tick.

    Raises:
        NotLeader: the lease is another clock's.
    """
    args = (token, lease_ms, budget_tokens, dead_after_ms, history, batch_seed)
    return Call("ms_tick", (keys.info(pool),), args, _tick)


def requeue(
    *, pool: str, worker: str, incarnation: str = "", lease: str = "", dead_after_ms: int = 0
) -> Call[int | None]:
    """Take a worker out: its jobs are placed anew, its batch is eligible again. None: it lives after all.

    Raises:
        NotLeader: `lease` is not the leader's. WorkerReplaced: the name has another incarnation.
    """

    def decode(reply: Any) -> int | None:
        match bytes(reply[0]).decode():
            case "not_leader":
                raise NotLeader("another clock leads this pool: it looks after dead workers")
            case "replaced":
                raise WorkerReplaced(f"worker {worker}: another process has this name now")
            case "alive":
                return None
        return int(reply[1])

    return Call("ms_requeue", (keys.info(pool),), (worker, incarnation, lease, dead_after_ms), decode)


def add_tenant(*, pool: str, tenant: str, weight: float = 1.0) -> Call[bool]:
    """Let a tenant in, or set its weight. True: it is new."""
    return Call("ms_add_tenant", (keys.info(pool),), (tenant, weight), lambda reply: int(reply) == 1)


# -- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """One request of a batch; the payload is still in the job's stream."""

    seq: int
    op: str
    tokens: int  # as announced by the client
    cancelled: bool


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What one job does in a batch."""

    tenant: str
    job: str
    chain: str  # of the accepted requests, when the batch was made
    lineage: str  # of the executed requests: what the worker's copy must have
    requests: tuple[Header, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """A worker's part of one cycle."""

    token: str
    cycle: int
    started_ms: int  # by the server's clock
    jobs: tuple[BatchJob, ...]


def decode_batch(fields: Mapping[bytes, bytes]) -> Batch:
    """A batch from its stream entry."""
    return Batch(
        token=fields[b"batch"].decode(),
        cycle=int(fields[b"cycle"]),
        started_ms=int(fields[b"started_ms"]),
        jobs=tuple(
            BatchJob(
                tenant=row["tenant"],
                job=row["job"],
                chain=row["chain"],
                lineage=row["lineage"],
                requests=tuple(Header(int(r[0]), str(r[1]), int(r[2]), r[3] == "cancelled") for r in row["requests"]),
            )
            for row in json.loads(fields[b"jobs"])
        ),
    )


@dataclass(frozen=True, slots=True)
class Executed:
    """One request that a worker has run."""

    tenant: str
    job: str
    seq: int
    op: str
    outcome: str  # "ok" or the error's code
    digest: str  # as in the stream
    payload_bytes: int
    result: bytes  # the packed envelope for the client


def register(
    *,
    pool: str,
    worker: str,
    incarnation: str,
    slots: int,
    base_model: str,
    base_model_path: str,
    vocab_size: int,
    max_length: int,
    fields: Mapping[str, str | int],
) -> Call[int]:
    """Take the worker's name. The reply is how many jobs an earlier process of that name had in hand.

    Raises:
        UnknownBaseModel: the pool's other workers serve another base model.
    """
    extra = [part for name, value in fields.items() for part in (name, value)]
    args = (worker, incarnation, slots, base_model, base_model_path, vocab_size, max_length, *extra)

    def decode(reply: Any) -> int:
        if bytes(reply[0]) == b"other_base_model":
            model = bytes(reply[1]).decode()
            raise UnknownBaseModel(
                f"pool {pool} serves {model!r}, this worker has {base_model!r}: one pool has one base model; "
                "use another pool (MAINSPRING_POOL) for another model",
                base_model=model,
            )
        return int(reply[1])

    return Call("ms_register", (keys.info(pool),), args, decode)


def heartbeat(*, pool: str, worker: str, incarnation: str) -> Call[bool]:
    """False: the name is another process's now, or the worker was declared dead."""
    return Call("ms_heartbeat", (keys.info(pool),), (worker, incarnation), lambda reply: int(reply) == 1)


def commit(
    *,
    pool: str,
    worker: str,
    incarnation: str,
    batch: str,
    result_ttl_ms: int,
    timings: Mapping[str, Any],
    executed: Iterable[Executed],
) -> Call[None]:
    """Make a batch's work true. `executed` is ordered by job, then by seq.

    Raises:
        StaleBatch: the batch is no longer this worker's; nothing was written.
    """
    args: list[Arg] = [worker, incarnation, batch, result_ttl_ms, json.dumps(dict(timings))]
    for e in executed:
        args += (e.tenant, e.job, e.seq, e.op, e.outcome, e.digest, e.payload_bytes, e.result)

    def decode(reply: Any) -> None:
        if int(reply) != 1:
            raise StaleBatch(f"worker {worker}: batch {batch[:12]} was taken back; its work is dropped")

    return Call("ms_commit", (keys.info(pool),), tuple(args), decode)
