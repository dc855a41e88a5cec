"""The output head and the loss in one pass over chunks of rows, so that logits [T, V] never exist as a whole.

While a chunk's logits are there, everything that needs them is done: the log-probability of each target, the loss,
and dloss/dlogits = dloss/dlogp · (onehot(target) − softmax(logits)), which is turned into dloss/dhidden at once.
A job that trains the unembedding has its LoRA applied inside the chunk.

    M  rows with a target      C  rows of a chunk      D  width      V  vocabulary      R  rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mainspring_workers.losses import LOSSES
from mainspring_workers.plan import LossRun, Run
from mainspring_workers.staging import Part, Slab, Work, add_product, product


@dataclass(frozen=True, slots=True)
class Head:
    """The frozen output projection; its weight may be tied to the embeddings."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    index: int  # in the model's list of targets


@dataclass(frozen=True, slots=True)
class HeadResult:
    logp: Tensor  # [M] float32: log-probability of the target
    loss: Tensor  # [M] float32
    dhidden: Tensor | None  # [M, D] in the dtype of `hidden`, if it was asked for


def head_pass(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    inputs: Mapping[str, Tensor],
    slabs: Sequence[Slab],
    runs: Sequence[Run],
    loss_runs: Sequence[LossRun],
    *,
    backward: bool,
    need_dhidden: bool,
) -> HeadResult:
    """Losses of the rows `hidden` [M, D] with `targets` [M] and the losses' `inputs` [M] each.

    With `backward`, gradients of LoRA on the head are added to the slabs, and dhidden is formed if it is needed.
    """
    total = hidden.shape[0]
    logp = torch.empty(total, device=hidden.device)
    loss = torch.empty(total, device=hidden.device)
    dhidden = torch.empty_like(hidden) if backward and need_dhidden else None
    size = chunk_rows(head.weight.shape[0])
    for start in range(0, total, size):
        chunk = slice(start, min(start + size, total))
        parts = Work(slabs, _inside(runs, chunk)).parts([head.index])
        logits, projected = _logits(head, hidden[chunk], parts)
        logprobs = torch.log_softmax(logits, -1, dtype=torch.float32)  # [C, V]
        del logits
        logp[chunk] = logprobs.gather(1, targets[chunk, None]).squeeze(1)
        dlogp = _losses(logp, loss, inputs, loss_runs, chunk)
        if not backward:
            continue
        dlogits = logprobs.exp_().mul_(dlogp.neg()[:, None])
        dlogits.scatter_add_(1, targets[chunk, None], dlogp[:, None])
        _backward(head, hidden[chunk], dlogits.to(hidden.dtype), parts, projected, dhidden, chunk)
    return HeadResult(logp, loss, dhidden)


def chunk_rows(vocab_size: int) -> int:
    """Rows of a chunk: logits that stay in a core's cache (2¹⁸ values), but enough rows (256) to make the products
    efficient, and 128 MiB of logits at the most."""
    return max(1, min(max(256, (1 << 18) // vocab_size), (1 << 25) // vocab_size))


def _inside(runs: Sequence[Run], chunk: slice) -> list[Run]:
    """The part of each (single-job) run within `chunk`, with rows counted from its start."""
    return [
        Run(r.group, r.first, r.last, max(r.start, chunk.start) - chunk.start, min(r.end, chunk.stop) - chunk.start)
        for r in runs
        if r.start < chunk.stop and r.end > chunk.start
    ]


def _logits(head: Head, hidden: Tensor, parts: Sequence[Part]) -> tuple[Tensor, list[Tensor]]:
    logits = F.linear(hidden, head.weight, head.bias)  # [C, V]
    projected = []
    for part in parts:
        ut = product(part.a, part.rows(hidden).mT)  # [R, n]
        add_product(part.rows(logits), ut.mT, part.bt[0])
        projected.append(ut)
    return logits, projected


def _losses(
    logp: Tensor, loss: Tensor, inputs: Mapping[str, Tensor], loss_runs: Sequence[LossRun], chunk: slice
) -> Tensor:
    """Fill `loss` for the chunk; returns dloss/dlogp [C]."""
    dlogp = torch.empty(chunk.stop - chunk.start, device=logp.device)
    for run in loss_runs:
        start, end = max(run.start, chunk.start), min(run.end, chunk.stop)
        if start < end:
            given = {name: values[start:end] for name, values in inputs.items()}
            losses, gradient = LOSSES[run.loss_fn].fn(logp[start:end], given, dict(run.config))
            loss[start:end] = losses
            dlogp[start - chunk.start : end - chunk.start] = gradient
    return dlogp


def _backward(
    head: Head,
    hidden: Tensor,
    dlogits: Tensor,
    parts: Sequence[Part],
    projected: Sequence[Tensor],
    dhidden: Tensor | None,
    chunk: slice,
) -> None:
    dh = None
    if dhidden is not None:
        dh = dhidden[chunk]
        torch.mm(dlogits, head.weight, out=dh)
    for part, ut in zip(parts, projected, strict=True):
        dlogits_part = part.rows(dlogits)
        dut = product(part.bt[0], dlogits_part.mT)  # [R, n]
        add_product(part.grad_bt[0], ut, dlogits_part)
        add_product(part.grad_a, dut, part.rows(hidden))
        if dh is not None:
            add_product(part.rows(dh), dut.mT, part.a)
