"""The worker's loop: take the batch of a cycle, fetch its payloads, run the engine, commit everything at once.

What the worker holds of a job is a cache. It is used only if its lineage (the hash over all requests executed so far) is
the one in the batch; otherwise the copy is dropped, and the job's requests fail with StateLost.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import RedisError

from mainspring_broker import functions, keys, library
from mainspring_broker.errors import (
    InternalError,
    LibraryMissing,
    MainspringError,
    PayloadInvalid,
    RequestCancelled,
    StaleBatch,
    TokenCountMismatch,
    WorkerReplaced,
)
from mainspring_broker.functions import Batch, BatchJob, Executed, Header
from mainspring_broker.logs import Trouble
from mainspring_broker.retry import Backoff
from mainspring_broker.wire import Envelope, Operation, decode_operation, encode_envelope, token_count
from mainspring_workers.engine import Engine, Outcome, WorkItem
from mainspring_workers.metrics import WorkerMetrics
from mainspring_workers.report import Spans, report_batch
from mainspring_workers.settings import WorkerSettings

log = logging.getLogger("mainspring.worker")

NO_LINEAGE = ""  # of a copy while its batch is not known to be committed: a batch must never run on it twice
BLOCK_MS = 500  # how long one wait for a batch lasts, so that a signal is seen


@dataclass(slots=True)
class Fetched:
    """A request with what its stream entry says."""

    header: Header
    digest: str
    chain: str
    accepted_ms: int
    payload_bytes: int
    operation: Operation | MainspringError


@dataclass(slots=True)
class Work:
    """One job's part of a batch."""

    job: BatchJob
    requests: list[Fetched]

    @property
    def name(self) -> str:
        return f"{self.job.tenant}/{self.job.job}"


class Worker:
    """One worker process. `run` blocks until `stop` is called (from a signal handler or another thread)."""

    def __init__(self, settings: WorkerSettings, client: redis.Redis, engine: Engine) -> None:
        self.settings = settings
        self.client = client
        self.engine = engine
        self.name = settings.worker or f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self.incarnation = ""
        self.metrics = WorkerMetrics()
        self.lineages: dict[str, str] = {}  # of the engine's copies
        self._stopping = threading.Event()
        self._fenced = threading.Event()  # a heartbeat was refused
        self._last_id = "0"
        self._trouble = Trouble(log, f"worker {self.name}: Redis")

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Serve batches until stopped; outlives a Redis that goes away and comes back.

        Raises:
            WorkerReplaced: another process has taken this worker's name.
            UnknownBaseModel: the pool serves another base model.
        """
        beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                if not self.incarnation:
                    self._register()
                    if not beats.is_alive():
                        beats.start()
                elif self._fenced.is_set():
                    self._check_name()
                else:
                    self._serve_one()
                backoff.reset()
                self._trouble.over()
            except LibraryMissing:
                self._trouble.again("the function library is not on the server yet, waiting for a clock")
                self._stopping.wait(1.0)
            except RedisError as error:
                self._redis_failed(error, backoff)
        self._leave()
        if beats.is_alive():
            beats.join()

    def _redis_failed(self, error: RedisError | LibraryMissing, backoff: Backoff) -> None:
        self._trouble.again(error)
        self.metrics.redis_errors.inc()
        self._stopping.wait(backoff.next())

    # -- belonging to the pool ----------------------------------------------------------------------------------------

    def _register(self) -> None:
        s, facts = self.settings, self.engine.facts
        library.check_version(library.loaded_version(self.client, keys.info(s.pool)))
        incarnation = secrets.token_hex(16)
        call = functions.register(
            pool=s.pool,
            worker=self.name,
            incarnation=incarnation,
            slots=s.slots,
            base_model=facts["base_model"],
            base_model_path=facts["base_model_path"],
            vocab_size=facts["vocab_size"],
            max_length=facts["max_length"],
            fields={
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "device": facts["device"],
                "dtype": facts["dtype"],
                "base_model": facts["base_model"],
                "storage": facts["storage"],
            },
        )
        functions.run(self.client, call)
        self._last_id, self.incarnation = "0", incarnation
        self._fenced.clear()
        log.info("worker %s serves %s in pool %s (%d slots)", self.name, facts["base_model"], s.pool, s.slots)

    def _check_name(self) -> None:
        """A heartbeat was refused: the name is another's, or this worker was declared dead and may come back."""
        holder = self.client.hget(keys.worker(self.settings.pool, self.name), "incarnation")
        if holder is not None and functions.text(holder) != self.incarnation:
            raise WorkerReplaced(f"worker {self.name}: another process has taken this name; this one ends")
        log.warning("worker %s was taken out of the pool; registering again", self.name)
        self.incarnation = ""

    def _beat(self) -> None:
        """Signs of life from a thread of its own: a long cycle is not a dead worker."""
        client = redis.Redis(connection_pool=self.client.connection_pool)
        while not self._stopping.wait(self.settings.heartbeat_ms / 1000):
            incarnation = self.incarnation
            if not incarnation:
                continue
            try:
                call = functions.heartbeat(pool=self.settings.pool, worker=self.name, incarnation=incarnation)
                if not functions.run(client, call) and incarnation == self.incarnation:
                    self._fenced.set()
            except (RedisError, LibraryMissing):
                continue  # the loop sees the same trouble and says so

    def _leave(self) -> None:
        if not self.incarnation:
            return
        try:
            call = functions.requeue(pool=self.settings.pool, worker=self.name, incarnation=self.incarnation)
            functions.run(self.client, call)
        except (RedisError, MainspringError) as error:
            log.warning("worker %s leaves without a word: %s", self.name, error)
        log.info("worker %s has left pool %s", self.name, self.settings.pool)

    # -- one batch ----------------------------------------------------------------------------------------------------

    def _serve_one(self) -> None:
        stream = keys.worker_batches(self.settings.pool, self.name)
        reply: Any = self.client.xread({stream: self._last_id}, count=1, block=BLOCK_MS)
        if not reply:
            if self.client.hexists(keys.pending(self.settings.pool), self.name):
                # It waits for a batch that was read before: Redis came back without its commit.
                self._last_id = "0"
            return
        (_, ((entry_id, fields),)), *_ = reply
        batch = functions.decode_batch(fields)
        begun = time.perf_counter()
        works = self._fetch(batch)
        if works is not None:
            self._run_batch(batch, works, begun)
        self._last_id = functions.text(entry_id)

    def _run_batch(self, batch: Batch, works: list[Work], begun: float) -> None:
        self._make_room(works)
        items = [item for work in works for item in self._items(work)]
        for work in works:
            self.lineages[work.name] = NO_LINEAGE
        fetched = time.perf_counter()
        outcomes = self._execute(items)
        computed = time.perf_counter()
        compute_ms = (computed - fetched) * 1000
        executed: list[Executed] = []
        lineages: dict[str, str] = {}
        each = iter(outcomes)
        for work in works:
            lineage = work.job.lineage
            for request in work.requests:
                done = self._executed(work.job, request, next(each), batch, compute_ms)
                lineage = functions.lineage_next(lineage, done.digest, done.outcome)
                executed.append(done)
            lineages[work.name] = lineage
        timings = {"fetch_ms": round((fetched - begun) * 1000, 3), "compute_ms": round(compute_ms, 3)}
        committed = self._commit(batch, executed, lineages, timings)
        spans = Spans(fetched - begun, computed - fetched, time.perf_counter() - computed)
        report_batch(self.metrics, batch, executed, outcomes, spans, committed=committed)
        self.metrics.jobs.set(len(self.lineages))

    def _fetch(self, batch: Batch) -> list[Work] | None:
        """All payloads of the batch in one round trip; None when the batch is no longer this worker's."""
        pool = self.settings.pool
        pipeline = self.client.pipeline(transaction=False)
        pipeline.hget(keys.pending(pool), self.name)
        for job in batch.jobs:
            stream = keys.requests(pool, job.tenant, job.job)
            pipeline.xrange(stream, f"{job.requests[0].seq}-0", f"{job.requests[-1].seq}-0")
        pending, *streams = pipeline.execute()
        if pending != batch.token.encode():
            return None
        return [Work(job, read_requests(job, dict(entries))) for job, entries in zip(batch.jobs, streams, strict=True)]

    def _make_room(self, works: list[Work]) -> None:
        """When the slots run out, drop the copies of jobs that moved away while this worker was out of the pool."""
        held = {name for name in self.lineages if self.engine.has(name)}
        if len(held | {work.name for work in works}) <= self.settings.slots:
            return
        placed: Any = self.client.smembers(keys.worker_jobs(self.settings.pool, self.name))
        for name in held - set(map(functions.text, placed)):
            log.info("job %s: it is no longer placed here, the copy is dropped", name)
            self.engine.drop(name)
            self.lineages.pop(name, None)

    def _items(self, work: Work) -> list[WorkItem]:
        if self.lineages.get(work.name) != work.job.lineage and self.engine.has(work.name):
            log.warning("job %s: the copy here is not at the job's lineage, it is dropped", work.name)
            self.engine.drop(work.name)
        return [WorkItem(work.name, r.header.seq, r.header.op, r.operation, r.chain) for r in work.requests]

    def _execute(self, items: list[WorkItem]) -> list[Outcome]:
        try:
            return self.engine.run(items)
        except Exception as error:  # the engine never raises for what clients send: this is a fault of ours
            log.exception("the engine failed on a batch of %d requests", len(items))
            for job in {item.job for item in items}:
                self.engine.drop(job)
            failure = InternalError(f"the worker failed on the whole batch: {type(error).__name__}: {error}")
            return [Outcome(item.job, item.seq, None, failure) for item in items]

    def _executed(self, job: BatchJob, request: Fetched, outcome: Outcome, batch: Batch, compute_ms: float) -> Executed:
        envelope = Envelope(
            result=outcome.result,
            error=outcome.error.to_wire() if outcome.error else None,
            cycle=batch.cycle,
            queued_ms=float(max(batch.started_ms - request.accepted_ms, 0)),
            compute_ms=round(compute_ms, 3),
            worker=self.name,
        )
        return Executed(
            tenant=job.tenant,
            job=job.job,
            seq=request.header.seq,
            op=request.header.op,
            outcome=outcome.error.code if outcome.error else "ok",
            digest=request.digest,
            payload_bytes=request.payload_bytes,
            result=encode_envelope(envelope),
        )

    def _commit(
        self, batch: Batch, executed: list[Executed], lineages: dict[str, str], timings: Mapping[str, Any]
    ) -> bool:
        """Commit, again after a lost connection. False: refused, and the copies that it would have made true are gone."""
        call = functions.commit(
            pool=self.settings.pool,
            worker=self.name,
            incarnation=self.incarnation,
            batch=batch.token,
            result_ttl_ms=self.settings.result_ttl_s * 1000,
            timings=timings,
            executed=executed,
        )
        backoff = Backoff()
        while True:
            try:
                functions.run(self.client, call)
                break
            except StaleBatch:
                # Taken back, or an earlier attempt went through and only its answer was lost: the lineage tells.
                return self._keep_only_committed(batch, lineages)
            except (RedisError, LibraryMissing) as error:  # the next clock that looks loads the library again
                if self._stopping.is_set():
                    raise
                self._redis_failed(error, backoff)
        self._trouble.over()
        for name, lineage in lineages.items():
            self._note(name, lineage)
        return True

    def _keep_only_committed(self, batch: Batch, lineages: dict[str, str]) -> bool:
        """Look at each job's lineage. True: the commit went through after all."""
        lost = False
        for job in batch.jobs:
            name = f"{job.tenant}/{job.job}"
            found = self.client.hget(keys.job(self.settings.pool, job.tenant, job.job), "lineage")
            if found is not None and functions.text(found) == lineages[name]:
                self._note(name, lineages[name])
            else:
                log.warning("job %s: the batch of cycle %d was taken back, the copy here is dropped", name, batch.cycle)
                self.engine.drop(name)
                self.lineages.pop(name, None)
                lost = True
        return not lost

    def _note(self, name: str, lineage: str) -> None:
        if self.engine.has(name):
            self.lineages[name] = lineage
        else:  # ended, or never opened
            self.lineages.pop(name, None)


def read_requests(job: BatchJob, entries: Mapping[bytes, Mapping[bytes, bytes]]) -> list[Fetched]:
    """The job's requests of a batch, from its stream entries by id."""
    fetched = []
    for header in job.requests:
        fields = entries.get(f"{header.seq}-0".encode(), {})
        payload, digest = fields.get(b"payload", b""), fields.get(b"digest", b"").decode()
        chain, accepted_ms = fields.get(b"chain", b"").decode(), int(fields.get(b"accepted_ms", 0))
        operation = read_operation(header, digest, payload)
        fetched.append(Fetched(header, digest, chain, accepted_ms, len(payload), operation))
    return fetched


def read_operation(header: Header, digest: str, payload: bytes) -> Operation | MainspringError:
    """The request's operation, or why it cannot be run. Never raises."""
    if header.cancelled:
        return RequestCancelled(f"request {header.seq} ({header.op}) was cancelled before it started")
    if functions.request_digest(header.op, payload) != digest:
        return PayloadInvalid(f"request {header.seq} ({header.op}): the payload is not the one that was announced")
    try:
        operation = decode_operation(header.op, payload)
    except MainspringError as error:
        return error
    count = token_count(operation)
    if count != header.tokens:
        return TokenCountMismatch(
            f"request {header.seq} ({header.op}): announced {header.tokens} tokens, the payload holds {count}",
            announced=header.tokens,
            found=count,
        )
    return operation
