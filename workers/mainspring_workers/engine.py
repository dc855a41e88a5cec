"""The public face of the compute core: one batch of a cycle in, one outcome per request out. No Redis anywhere.

A batch holds for each job a run of consecutive requests

    (init | load_state)?  (forward | forward_backward)*  optim_step?  (save_state | save_weights)*  end?

which are executed in phases over all jobs at once: open → compute → optimize → save → end. (Should a job's requests
go on behind that, as in a replay, the batch is run as several such waves.)

What fails, fails alone:

- A failed forward_backward poisons its job's pending gradient. Later forward_backwards of the same update still
  compute and return, but its optim_step fails with PrecedingRequestFailed, changes nothing, and clears gradient and
  poison, so that the job goes on clean. Poison and gradient outlive the batch. A failed forward poisons nothing.
- An optim_step that fails for its own sake (bad settings, undecodable) changes no weights either, and clears
  gradient and poison too: the update is over.
- A failed load_state changes nothing: weights, gradient and poison stay. As seq 1 it leaves no job.
- A request of a job that is not here fails with StateLost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from mainspring_broker.errors import (
    CheckpointMismatch,
    InternalError,
    MainspringError,
    NoGradient,
    OutOfMemory,
    PrecedingRequestFailed,
    StateLost,
)
from mainspring_broker.wire import End, ForwardBackward, Init, LoadState, Operation, OptimStep, SaveState, SaveWeights
from mainspring_workers.adapters import Adapter, AdapterPool
from mainspring_workers.base_model import BaseModel
from mainspring_workers.checkpoints import Checkpoints
from mainspring_workers.compute import Answer, Compute, ComputeRequest
from mainspring_workers.manifest import STATE, WEIGHTS, Place, check_fits
from mainspring_workers.optimizer import optim_step
from mainspring_workers.storage import Storage
from mainspring_workers.validate import check_forward_backward, check_init, check_optim_step

log = logging.getLogger(__name__)

T = TypeVar("T")
Kind = TypeVar("Kind", bound=Operation)

# Phase of each operation. One of an unknown name may have been meant as a gradient: it is failed in the compute phase.
PHASES = {
    "init": 0,
    "load_state": 0,
    "forward": 1,
    "forward_backward": 1,
    "optim_step": 2,
    "save_state": 3,
    "save_weights": 3,
    "end": 4,
}
COMPUTE = 1
# A failure of these leaves the pending gradient as it is; any other may have been meant to contribute to it.
NOT_A_GRADIENT = PHASES.keys() - {"forward_backward"}


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of a batch."""

    job: str  # <tenant>/<job>
    seq: int
    op: str  # name as queued
    operation: Operation | MainspringError  # the error, when the payload could not be decoded or was cancelled
    chain: str = ""  # of the job at this request: the same only if it is the same request again


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: either `result`, a map to be packed for the client, or `error`."""

    job: str
    seq: int
    result: dict[str, Any] | None
    error: MainspringError | None


class Engine:
    """Adapters of many jobs on one base model.

    Args:
        storage: where checkpoints are.
        micro_batch_tokens: tokens that go through the model together.
        slots: most jobs that can be open at a time.
        deterministic_isolation: see `Compute`.
    """

    def __init__(
        self,
        model: BaseModel,
        *,
        storage: Storage,
        micro_batch_tokens: int = 1024,
        slots: int = 64,
        deterministic_isolation: bool = False,
    ) -> None:
        self.facts: dict[str, Any] = {**model.facts, "slots": slots, "storage": storage.location("")}
        self._model = model
        self._checkpoints = Checkpoints(storage)
        self._pool = AdapterPool(model.targets, slots=slots, device=model.device)
        self._compute = Compute(
            model, micro_batch_tokens=micro_batch_tokens, deterministic_isolation=deterministic_isolation
        )

    def has(self, job: str) -> bool:
        """Whether the job's adapter is here."""
        return job in self._pool

    def drop(self, job: str) -> None:
        """Forget the job's adapter, gradient and optimizer state, if they are here."""
        self._pool.close(job)

    def run(self, items: Sequence[WorkItem]) -> list[Outcome]:
        """Execute one batch; outcomes in the order of `items`. Never raises for what a request contains.

        Results by operation: init `{"parameters"}`; load_state `{"parameters", "rank", "seed", "train_attn", "train_mlp",
        "train_unembed", "alpha", "step"}`; forward and forward_backward `{"logprobs", "lengths", "metrics": {"loss_sum",
        "loss_mean", "token_count"}}`; optim_step `{"metrics": {"grad_norm", "step", "learning_rate"}}`; save_state and
        save_weights `{"path", "location", "size_bytes"}`; end `{}`.
        """
        answers: dict[int, Answer] = {}
        for wave in _waves(items):
            for phase in range(len(set(PHASES.values()))):
                chosen = [i for i in wave if _phase(items[i]) == phase]
                if phase == COMPUTE:
                    answers.update(self._run_compute(items, chosen))
                else:
                    answers.update({i: self._run_one(items[i]) for i in chosen})
        return [_outcome(item, answers[i]) for i, item in enumerate(items)]

    def _run_compute(self, items: Sequence[WorkItem], chosen: Sequence[int]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        requests: dict[int, ComputeRequest] = {}
        for i in chosen:
            prepared = _guarded(partial(self._prepare, items[i]))
            if isinstance(prepared, ComputeRequest):
                requests[i] = prepared
            else:
                answers[i] = prepared
        if requests:
            answers.update(zip(requests, self._compute.run(list(requests.values())), strict=True))
        for i in sorted(chosen, key=lambda i: items[i].seq):
            item, answer = items[i], answers[i]
            adapter = self._pool.get(item.job)
            if adapter is not None and isinstance(answer, MainspringError) and item.op not in NOT_A_GRADIENT:
                adapter.poison_with(item.seq, answer)
        return answers

    def _prepare(self, item: WorkItem) -> ComputeRequest:
        adapter = self._adapter(item)
        op = _operation(item, ForwardBackward)
        batch = check_forward_backward(op, vocab_size=self._model.vocab_size, max_length=self._model.max_length)
        return ComputeRequest(adapter, item.seq, batch, op.backward)

    def _run_one(self, item: WorkItem) -> Answer:
        run: Callable[[WorkItem], dict[str, Any]] = {
            "init": self._init,
            "load_state": self._load_state,
            "optim_step": self._optim_step,
            "save_state": self._save_state,
            "save_weights": self._save_weights,
            "end": self._end,
        }[item.op]
        return _guarded(partial(run, item))

    def _init(self, item: WorkItem) -> dict[str, Any]:
        return {"parameters": self._open(item.job, _operation(item, Init)).parameters}

    def _open(self, job: str, init: Init) -> Adapter:
        check_init(init)
        try:
            return self._pool.open(job, init)
        except (MemoryError, RuntimeError) as error:  # torch's out-of-memory errors are RuntimeErrors
            raise OutOfMemory(f"there is no memory for an adapter of rank {init.rank}: {error}") from None

    def _load_state(self, item: WorkItem) -> dict[str, Any]:
        op = _operation(item, LoadState)
        if opens := item.seq == 1:
            self._pool.close(item.job)  # as with init: what came before is void
        present = None if opens else self._adapter(item)
        place = Place.of_path(item.job.partition("/")[0], op.path)
        loaded = self._checkpoints.load(place, optimizer=op.optimizer)
        check_fits(place, loaded.manifest, self._model.name, present.init if present else None)
        adapter = present or self._open(item.job, loaded.manifest.init)
        try:
            loaded.into(adapter)
        except ValueError as error:
            if opens:
                self._pool.close(item.job)
            message = f"{place.path} does not fit this job: {error}"
            raise CheckpointMismatch(message, base_model=self._model.name) from None
        facts = asdict(adapter.init)
        return {**facts, "parameters": adapter.parameters, "step": int(adapter.step.item())}

    def _optim_step(self, item: WorkItem) -> dict[str, Any]:
        adapter = self._adapter(item)
        try:
            op = _operation(item, OptimStep)
            if (poison := adapter.poison) is not None:
                message = (
                    f"forward_backward {poison.seq} of this update failed ({poison.error.code}): no part of the "
                    f"update was applied and its gradient was cleared; the next update starts clean"
                )
                raise PrecedingRequestFailed(message, seq=poison.seq, cause=poison.error.code)
            check_optim_step(op)
            if not adapter.has_gradient:
                raise NoGradient("there is no gradient to apply: submit a forward_backward before the optim_step")
            return {"metrics": optim_step(adapter, op)}
        finally:
            adapter.clear_gradient()

    def _save_state(self, item: WorkItem) -> dict[str, Any]:
        op = _operation(item, SaveState)
        return self._save(item, STATE, op.name, op.ttl_seconds)

    def _save_weights(self, item: WorkItem) -> dict[str, Any]:
        op = _operation(item, SaveWeights)
        return self._save(item, WEIGHTS, op.name, op.ttl_seconds)

    def _save(self, item: WorkItem, kind: str, name: str, ttl_seconds: int | None) -> dict[str, Any]:
        tenant, _, job = item.job.partition("/")
        place = Place.of_job(tenant, job, kind, name)
        adapter = self._pool.get(item.job)
        if adapter is not None:
            manifest = self._checkpoints.save(
                adapter,
                place,
                base_model=self._model.name,
                base_path=self._model.path,
                request=item.chain,
                ttl_seconds=ttl_seconds,
            )
        elif (found := self._checkpoints.saved_by(place, item.chain)) is not None:
            manifest = found  # a worker has saved it and died before its commit
        else:
            raise self._lost(item)
        return {"path": place.path, "location": self._checkpoints.location(place), "size_bytes": manifest.size}

    def _end(self, item: WorkItem) -> dict[str, Any]:
        self._adapter(item)
        self._pool.close(item.job)  # whatever the payload says: for everybody else the job has ended
        _operation(item, End)
        return {}

    def _adapter(self, item: WorkItem) -> Adapter:
        adapter = self._pool.get(item.job)
        if adapter is None:
            raise self._lost(item)
        return adapter

    def _lost(self, item: WorkItem) -> StateLost:
        return StateLost(f"job {item.job} has no adapter on this worker: it was never opened, ended, or lost")


def _operation(item: WorkItem, kind: type[Kind]) -> Kind:
    """The item's operation. Raises its error, if it is one."""
    if isinstance(item.operation, MainspringError):
        raise item.operation
    if not isinstance(item.operation, kind):
        raise InternalError(f"{item.op} {item.seq} carries a {type(item.operation).__name__}")
    return item.operation


def _guarded(call: Callable[[], T]) -> T | MainspringError:
    """What `call` returns, or the error it raises: one request must never stop a batch."""
    try:
        return call()
    except MainspringError as error:
        return error.with_traceback(None)  # it may be kept as poison, and would keep the batch's arrays alive
    except Exception as error:
        log.exception("a request failed in a way that is not its own fault")
        return InternalError(f"{type(error).__name__}: {error}")


def _phase(item: WorkItem) -> int:
    return PHASES.get(item.op, COMPUTE)


def _waves(items: Sequence[WorkItem]) -> list[list[int]]:
    """Indices of `items`, cut so that within a wave each job's phases only go forward, with one optim_step at most."""
    waves: list[list[int]] = []
    last: dict[str, tuple[int, int]] = {}  # job → (wave, phase) of its previous item
    for i in sorted(range(len(items)), key=lambda i: items[i].seq):
        item, phase = items[i], _phase(items[i])
        wave, before = last.get(item.job, (0, 0))
        if phase < before or (phase == before == PHASES["optim_step"]):
            wave += 1
        last[item.job] = (wave, phase)
        if wave == len(waves):
            waves.append([])
        waves[wave].append(i)
    return waves


def _outcome(item: WorkItem, answer: Answer) -> Outcome:
    if isinstance(answer, MainspringError):
        return Outcome(item.job, item.seq, None, answer)
    return Outcome(item.job, item.seq, answer, None)
