"""A service in the client's own process, for the tests of programs that use one: no Redis, clock, worker or torch.

`ServiceClient("mock://")`, or MAINSPRING_URL=mock://. Requests travel as they would to Redis; cycles follow the same rules:
of each job's queue the longest prefix `(init|load_state)? (forward|forward_backward)* optim_step? (save)* end?`.

A cycle begins a moment after somebody waits for a result, so that a pair that is submitted before either is awaited always
shares one, however slow the machine; if nobody waits, some time after the last request. What is behind the results is in
`mock_model.py`. A mock serves one ServiceClient, and everything is gone with it.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from mainspring.mock_model import MAX_LENGTH, VOCAB_SIZE, Model
from mainspring.settings import ClientSettings
from mainspring.transport import Outgoing, Progress
from mainspring_broker import keys, wire
from mainspring_broker.errors import (
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    InternalError,
    InvalidHyperparameter,
    JobEnded,
    JobExists,
    MainspringError,
    NoOptimizerState,
    RequestCancelled,
    StateLost,
    UnknownBaseModel,
)
from mainspring_broker.functions import JobHead, chain_next, chain_start

GATHER_S = 0.005  # as the real clock on an idle pool: wait so long for one more request …
GATHER_LIMIT_S = 0.025  # … and no longer than this
PATIENCE_S = 0.1  # when nobody waits for a result
STAGES = {"init": 0, "load_state": 0, "forward": 1, "forward_backward": 1, "optim_step": 2}
STAGES |= {"save_state": 3, "save_weights": 3, "end": 4}
ONCE = (0, 2, 4)
MAX_RANK = 256
DEFAULT_MODEL = "mainspring-tiny"


@dataclass(slots=True)
class _Checkpoint:
    init: wire.Init
    model: Model
    optimizer: bool


@dataclass(slots=True)
class _Job:
    writer: str
    chain: str
    last_seq: int = 0
    done_seq: int = 0
    expected: int = 0  # highest seq that somebody waits for
    ending: bool = False
    queue: deque[Outgoing] = field(default_factory=deque)
    cancelled: set[int] = field(default_factory=set)
    init: wire.Init | None = None
    model: Model | None = None

    @property
    def head(self) -> tuple[int, str, int]:
        return self.last_seq, self.chain, self.done_seq


class MockTransport:
    """Serves one client. All of it runs on the client's event loop, but for `expect`."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.where = settings.url
        self._tenant = keys.check_name("tenant", settings.tenant)
        self._base_model = settings.url.removeprefix("mock:").strip("/") or DEFAULT_MODEL
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._announced: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
        self._cycle = 0
        self._jobs: dict[str, _Job] = {}
        self._results: dict[tuple[str, int], bytes] = {}
        self._checkpoints: dict[str, _Checkpoint] = {}  # by path

    @property
    def lost_for_s(self) -> float:
        return 0.0

    async def aclose(self) -> None:
        """Nothing is held open."""

    async def check_library(self) -> None:
        """It is always the right one."""

    async def info(self) -> dict[str, str]:
        return {"base_model": self._base_model, "vocab_size": str(VOCAB_SIZE), "max_length": str(MAX_LENGTH)}

    # -- a job --------------------------------------------------------------------------------------------------------

    async def create_job(self, job: str, writer: str, base_model: str, rank: int, spec: Mapping[str, Any]) -> JobHead:
        if base_model != self._base_model:
            message = f"this mock serves the base model {self._base_model!r}; for another one: mock://{base_model}"
            raise UnknownBaseModel(message, base_model=self._base_model)
        found = self._jobs.setdefault(job, _Job(writer, chain_start(self._tenant, job, writer)))
        if found.writer != writer:
            raise JobExists(f"job {job}: the id is taken")
        return JobHead("created", *found.head)

    async def submit(self, job: str, writer: str, requests: Sequence[Outgoing]) -> list[JobHead | MainspringError]:
        if self._clock is None:
            self._loop = asyncio.get_running_loop()
            self._clock = asyncio.create_task(self._run())
        return [self._accept(job, self._jobs[job], request) for request in requests]

    def _accept(self, name: str, job: _Job, request: Outgoing) -> JobHead | MainspringError:
        if job.ending:
            return JobEnded(f"job {name}: the job has been ended, it takes no more requests")
        job.last_seq, job.chain = request.seq, chain_next(request.chain, request.digest)
        job.ending = request.op == "end"
        job.queue.append(request)
        self._changed.set()
        return JobHead("accepted", *job.head)

    async def cancel(self, job: str, writer: str, seq: int) -> bool:
        if seq <= self._jobs[job].done_seq:
            return False
        self._jobs[job].cancelled.add(seq)
        return True

    async def progress(self, jobs: Sequence[str]) -> list[Progress | None]:
        found = [self._jobs.get(job) for job in jobs]
        return [None if job is None else Progress(job.last_seq, job.done_seq, job.chain) for job in found]

    async def results(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        """Each once: nobody asks again for what he has."""
        return [self._results.pop(place, None) for place in wanted]

    async def announcements(self) -> AsyncIterator[tuple[str, int] | None]:
        yield None
        while True:
            yield await self._announced.get()

    def expect(self, job: str, seq: int) -> None:
        def note() -> None:
            self._jobs[job].expected = max(self._jobs[job].expected, seq)
            self._changed.set()

        if self._loop is not None:
            with suppress(RuntimeError):  # closed: nobody will get an answer
                self._loop.call_soon_threadsafe(note)

    # -- the clock ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._boundary()
            self._cycle += 1
            for name, job in self._jobs.items():
                for request in _prefix(job):
                    envelope = self._execute(name, job, request)
                    self._results[name, request.seq] = wire.encode_envelope(envelope)
                    job.done_seq = request.seq
                    self._announced.put_nowait((name, request.seq))

    async def _boundary(self) -> None:
        """Return when a cycle should begin."""
        loop = asyncio.get_running_loop()
        opened: float | None = None
        while True:
            self._changed.clear()
            quiet: float | None = None  # so long, without anything new
            if any(job.expected > job.done_seq and job.queue for job in self._jobs.values()):
                opened = opened or loop.time()
                quiet = min(GATHER_S, opened + GATHER_LIMIT_S - loop.time())
            elif any(job.queue for job in self._jobs.values()):
                quiet = PATIENCE_S
            try:
                async with asyncio.timeout(quiet):
                    await self._changed.wait()
            except TimeoutError:
                return

    # -- the worker ---------------------------------------------------------------------------------------------------

    def _execute(self, name: str, job: _Job, request: Outgoing) -> wire.Envelope:
        result: dict[str, Any] | None = None
        error: MainspringError | None = None
        try:
            if request.seq in job.cancelled:
                raise RequestCancelled(f"job {name}, request {request.seq}: cancelled before it started")
            result = self._result(name, job, wire.decode_operation(request.op, request.payload))
        except Exception as raised:  # the clock goes on, whatever a request holds
            internal = InternalError(f"the mock cannot compute this: {raised!r}")
            error = raised if isinstance(raised, MainspringError) else internal
            if job.model is not None and request.op == "forward_backward":
                job.model.poison = job.model.poison or error.code
        job.cancelled.discard(request.seq)
        return wire.Envelope(result, error.to_wire() if error else None, self._cycle, 0.0, 0.0, "mock")

    def _result(self, name: str, job: _Job, op: wire.Operation) -> dict[str, Any]:
        match op:
            case wire.Init():
                job.init, job.model = op, _fresh(op)
                return {"parameters": job.model.parameters}
            case wire.LoadState():
                return self._load(job, op)
        if job.model is None or job.init is None:
            raise StateLost(f"job {name} was never opened")
        match op:
            case wire.ForwardBackward():
                return job.model.compute(op)
            case wire.OptimStep():
                return job.model.optim_step(op)
            case wire.SaveState():
                return self._save(f"{name}/weights/{op.name}", job.init, job.model, optimizer=True)
            case wire.SaveWeights():
                return self._save(f"{name}/sampler_weights/{op.name}", job.init, job.model, optimizer=False)
            case _:
                job.model = None
                return {}

    def _save(self, place: str, init: wire.Init, model: Model, *, optimizer: bool) -> dict[str, Any]:
        path = f"mainspring://{place}"
        if path in self._checkpoints:
            raise CheckpointExists(f"{path} was saved before, and a saved checkpoint never changes: use another name")
        self._checkpoints[path] = _Checkpoint(init, copy.deepcopy(model), optimizer)
        return {"path": path, "location": self.where + place, "size_bytes": model.weights.nbytes}

    def _load(self, job: _Job, op: wire.LoadState) -> dict[str, Any]:
        found = self._checkpoints.get(op.path)
        if found is None:
            raise CheckpointNotFound(f"there is no checkpoint {op.path}")
        if op.optimizer and not found.optimizer:
            raise NoOptimizerState(f"{op.path} holds weights only")
        if job.init is not None and job.init.rank != found.init.rank:
            raise CheckpointMismatch(f"{op.path} has rank {found.init.rank}, this job has {job.init.rank}")
        model = (
            copy.deepcopy(found.model) if op.optimizer else Model(found.model.parameters, found.model.weights.copy())
        )
        job.init, job.model = job.init or found.init, model
        return {**asdict(job.init), "parameters": model.parameters, "step": model.step}


def _prefix(job: _Job) -> list[Outgoing]:
    """Take from the queue what may run in one cycle."""
    taken: list[Outgoing] = []
    stage = 0
    while job.queue:
        at = STAGES.get(job.queue[0].op, 1)
        if at < stage or (at in ONCE and at == stage and taken):
            break
        taken.append(job.queue.popleft())
        stage = at
    return taken


def _fresh(init: wire.Init) -> Model:
    if not 1 <= init.rank <= MAX_RANK:
        raise InvalidHyperparameter(f"rank is {init.rank}; allowed is 1 to {MAX_RANK}", field="rank", limit=MAX_RANK)
    if not (init.train_attn or init.train_mlp or init.train_unembed):
        raise InvalidHyperparameter("all train_ flags are off: there would be nothing to train", field="train_attn")
    return Model(parameters=1000 * init.rank)
