"""Frozen linear maps with the LoRA of many jobs: the base product for all rows at once, LoRA per run of jobs.

    y = x Wᵀ + bias,   then for the rows of each job   y += (x Aᵀ) (s·B)ᵀ,   s = alpha / R

    T  rows (tokens)      I, O  input and output width      R  rank      J, n  jobs of a run and rows of each
    G  linear maps that read the same x (query, key and value; gate and up): their A's lie stacked, [G·R, I]

Backward, with hᵀ = A xᵀ saved and dhᵀ = (s·B)ᵀ dyᵀ:

    dx = dy W + dh A        dA += dhᵀ x        d(s·B)ᵀ += hᵀ dy

dA and dB are added straight to the staging rows, so autograd never sees them: cost and memory go with the jobs that
are in the micro-batch, not with those that exist. Rows are selected by slicing, never masked by multiplying: a
neighbour's NaN cannot cross over (0 · NaN is NaN).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mainspring_workers.staging import Part, Work, add_product, product


class Context:
    """What the FusedLinears of a model share.

    Attributes:
        work: of the running micro-batch; None: run the plain base model.
        trace: when it is a list, each call is noted in it as (index, x).
        anchor: makes autograd record the first adapted layer although its input needs no gradient, so that nothing is
            computed below it.
    """

    def __init__(self, device: torch.device) -> None:
        self.work: Work | None = None
        self.trace: list[tuple[int, Tensor]] | None = None
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._shared: tuple[Tensor, list[Tensor]] | None = None  # an input, and what its later readers will return

    def clear(self) -> None:
        """Be the plain base model again, and hold on to nothing."""
        self.work = None
        self._shared = None

    def output(self, layer: FusedLinear, x: Tensor, work: Work) -> Tensor:
        """What `layer` makes of `x`; the first reader of an input computes for the others, too."""
        if layer is layer.readers[0]:
            parts = work.parts([reader.index for reader in layer.readers])
            if not parts:
                outputs = [F.linear(x, reader.weight, reader.bias) for reader in layer.readers]
            else:
                outputs = list(_FusedLoRA.apply(x, self.anchor, layer.readers, parts))  # type: ignore[no-untyped-call]
            self._shared = (x, outputs)
        if self._shared is None or self._shared[0] is not x:
            raise RuntimeError("linear maps that shared an input when the model was loaded do not share it now")
        outputs = self._shared[1]
        if len(outputs) == 1:
            self._shared = None
        return outputs.pop(0)


class FusedLinear(nn.Module):
    """Takes the place of one `nn.Linear`, whose frozen weight it keeps."""

    def __init__(self, linear: nn.Linear, index: int, context: Context) -> None:
        super().__init__()
        self.weight = linear.weight  # [O, I]
        self.bias = linear.bias  # [O] or None
        self.index = index  # in the model's list of targets
        self.context = context
        self.readers: Sequence[FusedLinear] = (self,)  # of this layer's input, in the order in which they are called

    def forward(self, x: Tensor) -> Tensor:
        context = self.context
        if context.trace is not None:
            context.trace.append((self.index, x))
        if context.work is None:
            return F.linear(x, self.weight, self.bias)
        return context.output(self, x, context.work)

    def extra_repr(self) -> str:
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}"


class _FusedLoRA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, layers: Sequence[FusedLinear], parts: list[Part]
    ) -> tuple[Tensor, ...]:
        rows = x.reshape(-1, x.shape[-1])  # [T, I]
        outputs = [F.linear(rows, layer.weight, layer.bias) for layer in layers]  # G times [T, O]
        saved = []
        for part in parts:
            ht = product(part.a, part.rows(rows).mT)  # [G·R, n] or [J, G·R, n]
            for y, ht_own, bt in zip(outputs, part.split(ht), part.bt, strict=True):
                add_product(part.rows(y), ht_own.mT, bt)
            saved.append(ht)
        ctx.parts, ctx.layers = parts, layers
        ctx.save_for_backward(x, *saved)
        return tuple(y.view(*x.shape[:-1], -1) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, *saved = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        dys = [grad.reshape(-1, grad.shape[-1]).contiguous() for grad in grads]  # G times [T, O]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dys[0], ctx.layers[0].weight)  # [T, I]
            for dy, layer in zip(dys[1:], ctx.layers[1:], strict=True):
                dx.addmm_(dy, layer.weight)
        for part, ht in zip(ctx.parts, saved, strict=True):
            dhts = []
            for dy, ht_own, bt, grad_bt in zip(dys, part.split(ht), part.bt, part.grad_bt, strict=True):
                dy_part = part.rows(dy)
                dhts.append(product(bt, dy_part.mT))  # [R, n] or [J, R, n]
                add_product(grad_bt, ht_own, dy_part)
            dht = dhts[0] if len(dhts) == 1 else torch.cat(dhts, -2)  # [G·R, n] or [J, G·R, n]
            add_product(part.grad_a, dht, part.rows(rows))
            if dx is not None:
                add_product(part.rows(dx), dht.mT, part.a)
        return (None if dx is None else dx.view_as(x)), None, None, None
