"""A clock and a worker in one thread, with made-up arithmetic: everything a client can see of a service, and no torch.

The log-probability of a token is minus a thousandth of its target, so a test can tell whose result it got.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import redis

import mainspring as trio
from mainspring_broker import functions, keys, library, wire
from mainspring_broker.errors import (
    EmptyBatch,
    InvalidHyperparameter,
    MainspringError,
    PrecedingRequestFailed,
    RequestCancelled,
    StateLost,
)
from mainspring_broker.functions import Batch, BatchJob, Executed, Header, run

NAME = "fake-service"  # of its connection in CLIENT LIST
WORKER, INCARNATION, LEASE = "fake-worker", "fake-incarnation", "fake-lease"
MAX_RANK = 64
BASE_MODEL = "tiny"


@contextmanager
def serving(url: str, pool: str, **limits: int) -> Iterator[FakeService]:
    """A fake service; `limits` are those of the pool, e.g. `max_backlog=4`."""
    service = FakeService(url, pool, **limits)
    try:
        yield service
    finally:
        service.close()


def make_batch(number: int = 1, datums: int = 1, tokens: int = 4) -> list[trio.Datum]:
    """A batch whose log-probabilities are all -number / 1000."""
    return [
        trio.Datum(trio.ModelInput.from_ints(list(range(tokens))), {"target_tokens": [number] * tokens})
        for _ in range(datums)
    ]


def number_of(output: trio.ForwardBackwardOutput) -> int:
    """The number of the batch whose result this is."""
    return round(-1000 * output.loss_fn_outputs[0]["logprobs"].tolist()[0])


class FakeService:
    """Serves one pool until closed.

    Attributes:
        executed: (job, seq, op) in the order of execution.
        result_ttl_ms: how long results are kept; may be changed at any time, as those below.
        cycle_s: how long a cycle lasts at least.
        budget_tokens: of a cycle.
    """

    def __init__(self, url: str, pool: str, *, base_model: str = BASE_MODEL, **limits: int) -> None:
        self.pool = pool
        self.executed: list[tuple[str, int, str]] = []
        self.result_ttl_ms = 60_000
        self.cycle_s = 0.0
        self.budget_tokens = 100_000
        self._redis = redis.Redis.from_url(url, client_name=NAME)
        self._lost = False
        self._poisoned: set[str] = set()
        self._steps: dict[str, int] = {}  # by job; a job that is not there was never opened
        self._lock = threading.Lock()  # held while a cycle runs, and by `paused`
        self._stop = threading.Event()
        library.load(self._redis)
        if limits:
            self._redis.hset(keys.info(pool), mapping=limits)
        run(self._redis, functions.add_tenant(pool=pool, tenant="default"))
        self._base_model = base_model
        self._register()
        self._thread = threading.Thread(target=self._serve, name="fake-service")
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No cycle runs inside."""
        with self._lock:
            yield

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._redis.close()

    def _register(self) -> None:
        """Take the worker's name; what an earlier life had in hand is handed back."""
        run(
            self._redis,
            functions.register(
                pool=self.pool,
                worker=WORKER,
                incarnation=INCARNATION,
                slots=100_000,
                base_model=self._base_model,
                base_model_path=f"/models/{self._base_model}",
                vocab_size=1000,
                max_length=64,
                fields={},
            ),
        )

    def _serve(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                worked = self._cycle()
            self._stop.wait(0 if worked else 0.002)

    def _cycle(self) -> bool:
        try:
            if self._lost:
                self._register()
                self._lost = False
            run(self._redis, functions.lead(pool=self.pool, token=LEASE, lease_ms=60_000, name="fake-clock"))
            run(self._redis, functions.heartbeat(pool=self.pool, worker=WORKER, incarnation=INCARNATION))
            tick = run(
                self._redis,
                functions.tick(
                    pool=self.pool,
                    token=LEASE,
                    lease_ms=60_000,
                    budget_tokens=self.budget_tokens,
                    dead_after_ms=60_000,
                    history=100,
                    batch_seed=np.random.bytes(8).hex(),
                ),
            )
            if tick.status != "started":
                return False
            self._stop.wait(self.cycle_s)
            _, fields = self._redis.xrevrange(keys.worker_batches(self.pool, WORKER), count=1)[0]
            self._commit(functions.decode_batch(fields))
            return True
        except (redis.ConnectionError, MainspringError):  # a test restarts the server
            self._lost = True
            return False

    def _commit(self, batch: Batch) -> None:
        executed = [self._execute(batch, job, header) for job in batch.jobs for header in job.requests]
        run(
            self._redis,
            functions.commit(
                pool=self.pool,
                worker=WORKER,
                incarnation=INCARNATION,
                batch=batch.token,
                result_ttl_ms=self.result_ttl_ms,
                timings={},
                executed=executed,
            ),
        )

    def _execute(self, batch: Batch, job: BatchJob, header: Header) -> Executed:
        place = f"{header.seq}-0"
        [(_, entry)] = self._redis.xrange(keys.requests(self.pool, job.tenant, job.job), place, place)
        self.executed.append((job.job, header.seq, header.op))
        result, error = None, None
        try:
            if header.cancelled:
                raise RequestCancelled("cancelled before it started")
            result = self._result(job.job, header, wire.decode_operation(header.op, entry[b"payload"]))
        except MainspringError as raised:
            error = raised
            if header.op == "forward_backward":
                self._poisoned.add(job.job)
        envelope = wire.Envelope(result, error and error.to_wire(), batch.cycle, 1.0, 2.0, WORKER)
        return Executed(
            job.tenant,
            job.job,
            header.seq,
            header.op,
            error.code if error else "ok",
            entry[b"digest"].decode(),
            len(entry[b"payload"]),
            wire.encode_envelope(envelope),
        )

    def _result(self, job: str, header: Header, operation: wire.Operation) -> dict[str, Any]:
        if isinstance(operation, wire.Init):
            if operation.rank > MAX_RANK:
                raise InvalidHyperparameter(f"rank {operation.rank} is above {MAX_RANK}")
            self._steps[job] = 0
            return {"parameters": operation.rank * 100}
        if job not in self._steps:
            raise StateLost(f"job {job} is not on this worker")
        if isinstance(operation, wire.ForwardBackward):
            if not len(operation.tokens.lengths):
                raise EmptyBatch("the batch has no datum")
            targets = operation.inputs["target_tokens"].values.astype(np.float32)
            return {
                "logprobs": -targets / 1000,
                "lengths": operation.tokens.lengths,
                "metrics": {
                    "loss_sum": float(targets.sum()) / 1000,
                    "loss_mean": float(targets.mean()) / 1000,
                    "token_count": len(targets),
                },
            }
        if isinstance(operation, wire.OptimStep):
            if job in self._poisoned:
                self._poisoned.discard(job)
                raise PrecedingRequestFailed("a forward_backward of this update failed")
            self._steps[job] += 1
            return {
                "metrics": {
                    "grad_norm": 1.0,
                    "step": self._steps[job],
                    "learning_rate": operation.learning_rate,
                }
            }
        if isinstance(operation, wire.SaveState | wire.SaveWeights):
            return {"path": f"mainspring://{job}/x/{operation.name}", "location": f"/adapters/{job}", "size_bytes": 7}
        return {}
