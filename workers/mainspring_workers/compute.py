"""The fused pass: forward (and backward) of all requests of a cycle through the base model together.

    plan → stage → for each micro-batch: backbone, head and loss, backward → check → commit, job by job

Gradients reach an adapter only after the whole pass succeeded and its own part is finite. A pass that fails (out of
memory, a bug) leaves nothing behind and is tried again job by job, then request by request, so that only the culprit
fails.

    T  tokens of the pass or micro-batch      M  tokens with a target      D  model width      P  parameters
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mainspring_broker.errors import InternalError, MainspringError, NonFiniteGradient, OutOfMemory
from mainspring_workers.adapters import Adapter
from mainspring_workers.attention import PackedSequences
from mainspring_workers.base_model import BaseModel
from mainspring_workers.head import head_pass
from mainspring_workers.plan import BatchPlan, MicroBatch, PlanRequest, build_plan
from mainspring_workers.staging import Slab, Work
from mainspring_workers.validate import Batch

log = logging.getLogger(__name__)

Answer = dict[str, Any] | MainspringError


@dataclass(frozen=True, slots=True)
class ComputeRequest:
    """One checked forward (`backward` False) or forward_backward."""

    adapter: Adapter
    seq: int
    batch: Batch
    backward: bool


class Compute:
    """Runs passes on one base model.

    Args:
        micro_batch_tokens: tokens that go through the model together; bounds the memory for activations.
        deterministic_isolation: give each job a pass of its own, so that its result is bit for bit independent of
            who else is in the cycle (matrix products of another size may round differently). Costs 15 to 100 % time.
    """

    def __init__(self, model: BaseModel, *, micro_batch_tokens: int, deterministic_isolation: bool) -> None:
        self._model = model
        self._micro_batch_tokens = micro_batch_tokens
        self._isolate = deterministic_isolation

    def run(self, requests: Sequence[ComputeRequest]) -> list[Answer]:
        """Answers in the order of `requests`; gradients of the good ones are added to their adapters.

        An answer is the result map (see `_answer`) or NonFiniteGradient, OutOfMemory or InternalError.
        """
        answers: dict[int, Answer] = {}
        for backward in (True, False):
            chosen = [i for i, request in enumerate(requests) if request.backward == backward]
            pieces = _by_job(requests, chosen) if self._isolate else [chosen]
            for piece in pieces:
                if piece:
                    answers.update(zip(piece, self._attempt([requests[i] for i in piece]), strict=True))
        return [answers[i] for i in range(len(requests))]

    def _attempt(self, requests: Sequence[ComputeRequest]) -> list[Answer]:
        """One pass over `requests` (all with or all without backward); if it fails, its pieces one by one."""
        try:
            return self._pass(requests)
        except Exception as error:
            failure = _translate(error)
            log.warning("a pass over %d requests failed: %s", len(requests), failure.message, exc_info=error)
        # Outside of the except block: the traceback, and with it the failed pass's memory, is gone now.
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        everything = range(len(requests))
        pieces = _by_job(requests, everything)
        if len(pieces) == 1:
            pieces = [[i] for i in everything]
        if len(pieces) == 1:
            return [failure]
        answers: dict[int, Answer] = {}
        for piece in pieces:
            answers.update(zip(piece, self._attempt([requests[i] for i in piece]), strict=True))
        return [answers[i] for i in everything]

    def _pass(self, requests: Sequence[ComputeRequest]) -> list[Answer]:
        backward = requests[0].backward
        adapters = {request.adapter.job: request.adapter for request in requests}
        plan = build_plan(
            [PlanRequest(r.adapter.layout.key, r.adapter.job, r.seq, r.batch) for r in requests],
            self._micro_batch_tokens,
        )
        groups = [[adapters[job] for job in group] for group in plan.groups]
        slabs = [Slab(group[0].layout, group, self._model.dtype) for group in groups]
        outputs = _Outputs(plan, self._model.device)
        for micro_batch in plan.micro_batches:
            self._micro_batch(micro_batch, outputs, slabs, backward)
        logp, loss = outputs.logp.cpu().numpy(), outputs.loss.cpu().numpy()
        answers = [
            _answer(request.batch, logp[start:end], loss[start:end])
            for request, (start, end) in zip(requests, plan.spans, strict=True)
        ]
        return self._commit(requests, slabs, answers) if backward else answers

    def _micro_batch(self, micro: MicroBatch, outputs: _Outputs, slabs: Sequence[Slab], backward: bool) -> None:
        if micro.head_rows is not None and not len(micro.head_rows):
            return  # every target is ignored: nothing would come out of it
        model, rows = self._model, slice(micro.start, micro.end)
        work = Work(slabs, micro.runs)
        packed = PackedSequences.of(micro.attention, model.device)
        model.context.work = work
        try:
            with torch.set_grad_enabled(backward):
                hidden = model.hidden(outputs.tokens[rows], outputs.positions[rows], packed)  # [T, D]
        finally:
            model.context.clear()
        chosen = None if micro.head_rows is None else torch.from_numpy(micro.head_rows).to(model.device)  # [M]
        with torch.no_grad():
            result = head_pass(
                model.head,
                _select(hidden.detach(), chosen),
                _select(outputs.targets[rows], chosen),
                {name: _select(values[rows], chosen) for name, values in outputs.inputs.items()},
                slabs,
                micro.head_runs,
                micro.loss_runs,
                backward=backward,
                need_dhidden=hidden.requires_grad,
            )
            _place(outputs.logp[rows], chosen, result.logp)
            _place(outputs.loss[rows], chosen, result.loss)
        if result.dhidden is not None:
            dhidden = (
                result.dhidden if chosen is None else torch.zeros_like(hidden).index_copy_(0, chosen, result.dhidden)
            )
            hidden.backward(dhidden)  # type: ignore[no-untyped-call]

    def _commit(self, requests: Sequence[ComputeRequest], slabs: Sequence[Slab], answers: list[Answer]) -> list[Answer]:
        """Add the staged gradients of every job that is wholly finite; the answers, with failures in their place."""
        staged: dict[str, Tensor] = {}
        for slab in slabs:
            slab.finish()
            totals = slab.staged.sum(1).tolist()  # not finite if a single value is not: cheaper than to ask each
            for adapter, row, total in zip(slab.adapters, slab.staged, totals, strict=True):
                if math.isfinite(total):
                    staged[adapter.job] = row
        for piece in _by_job(requests, range(len(requests))):
            adapter = requests[piece[0]].adapter
            if any(isinstance(answers[i], MainspringError) for i in piece):
                continue  # the engine poisons the update for it, so there is no use in the rest of its gradient
            if adapter.job in staged:
                adapter.grad.add_(staged[adapter.job])
                adapter.has_gradient = True
            elif len(piece) == 1:
                answers[piece[0]] = NonFiniteGradient("the loss is finite, but its gradient is NaN or infinite")
            else:  # which of the job's requests was it?
                for i in piece:
                    (answers[i],) = self._attempt([requests[i]])
        return answers


class _Outputs:
    """The flat arrays of a pass on the device: what goes in, and log-probabilities and losses as they come out."""

    def __init__(self, plan: BatchPlan, device: torch.device) -> None:
        self.tokens = torch.from_numpy(plan.tokens).to(device)  # [T]
        self.positions = torch.from_numpy(plan.positions).to(device)
        self.targets = torch.from_numpy(plan.targets).to(device)
        self.inputs = {name: torch.from_numpy(values).to(device) for name, values in plan.inputs.items()}
        self.logp = torch.zeros(len(plan.tokens), device=device)  # 0 where the target is ignored
        self.loss = torch.zeros(len(plan.tokens), device=device)


def _select(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _place(out: Tensor, rows: Tensor | None, values: Tensor) -> None:
    if rows is None:
        out.copy_(values)
    else:
        out.index_copy_(0, rows, values)


def _by_job(requests: Sequence[ComputeRequest], chosen: Sequence[int]) -> list[list[int]]:
    """Indices of the `chosen` requests, one list a job."""
    jobs: dict[str, list[int]] = {}
    for i in chosen:
        jobs.setdefault(requests[i].adapter.job, []).append(i)
    return list(jobs.values())


def _answer(batch: Batch, logp: NDArray[np.float32], loss: NDArray[np.float32]) -> Answer:
    """The result map of one request, from its slices [T] of the pass.

    logprobs: float32 [T], log-probability of each target, 0.0 where the target is ignored; lengths: int32 [N];
    metrics: loss_sum, loss_mean (loss_sum / token_count, or 0.0), token_count (targets whose weight is not 0).
    """
    if not np.isfinite(logp).all():
        return NonFiniteGradient("the computation gave NaN or infinity: the adapter's weights have diverged")
    if not np.isfinite(loss).all():
        datum = batch.datum_of(int(np.argmin(np.isfinite(loss))))
        message = (
            f"the loss of datum {datum} overflows float32: its inputs are too large, or its logprobs far too small"
        )
        return NonFiniteGradient(message, datum=datum)
    total = float(loss.sum(dtype=np.float64))
    metrics = {
        "loss_sum": total,
        "loss_mean": total / batch.counted if batch.counted else 0.0,
        "token_count": batch.counted,
    }
    return {"logprobs": logp.copy(), "lengths": batch.lengths, "metrics": metrics}


def _translate(error: Exception) -> MainspringError:
    # torch reports a failed allocation on the CPU as a plain RuntimeError.
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    if out_of_memory:
        return OutOfMemory("the request alone does not fit this worker's memory: send shorter or fewer sequences")
    return InternalError(f"the computation failed: {type(error).__name__}: {error}")
